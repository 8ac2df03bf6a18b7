"""Jobs: training runs to start, and plans to predict."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from moesaic.api.cluster import Cluster
from moesaic.api.launch import is_leader, is_torchrun
from moesaic.api.loads import recorded_loads
from moesaic.api.memory_replay import forecast
from moesaic.api.plan_search import (
    PartChoice,
    choose_part,
    facts_of_search,
    search_job,
    search_largest,
    search_remedy,
)
from moesaic.api.prepared_run import (
    PreparedRun,
    check_search,
    count_ranks,
    earlier_plan,
    kept_plan,
    own_plan,
    resolve_run,
    run_warnings,
)
from moesaic.api.progress import Output
from moesaic.api.run import Run, failure_in
from moesaic.api.train_worker import TrainTask, default_out, resumed_run
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job as LanguageModelJob
from moesaic.facts.plan.search import SEARCH_WORK
from moesaic.train.input_checks import check_inputs
from moesaic.train.job_file import (
    LoadedJob,
    TrainingJob,
    apply_plan,
    blame_sets,
    language_model,
    load_job,
)
from moesaic.train.out_checks import (
    check_out_is_not_data,
    check_writable,
    disk_warnings,
    holds_failed_try,
)
from moesaic.train.resumed_job import RunSource, check_learning, unkept_changes

if TYPE_CHECKING:
    from moesaic.facts.plan.search import SearchFacts
    from moesaic.policy.plan.choices import RecordedLoads
    from moesaic.policy.plan.predict import PlannedJob
    from moesaic.train.trainer import StepCallback

    AnyPlan: TypeAlias = PlannedJob | Mapping[str, Any] | str | Path


class Job:
    """A training job: model, data, optimizer and layout."""

    def __init__(
        self,
        source: Path | dict[str, Any] | None,
        sets: Sequence[str] = (),
        run: Path | None = None,
        *,
        needs_data: bool = False,
    ) -> None:
        self._source, self._sets, self._run = source, sets, run
        self._loaded = load_job(source, sets, run, needs_data=needs_data)

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any] | None,
        *,
        sets: Sequence[str] = (),
        run: Path | None = None,
        needs_data: bool = False,
    ) -> Job:
        """Return a job, checked; raise ConfigError for a mistake.

        Args:
            source: path of a job file, or its tables as a dict; None: the job of `run`.
            sets: changes of single keys, such as "train.steps=100".
            run: run to resume or its checkpoint, whose own `sets` stay. The run has a copy of a
                model whose directory is gone.
            needs_data: True for a job to train: its keys of [data] and `train.steps` are checked
                with all others, and not first by `train`. Plans need none.
        """
        if isinstance(source, Mapping):
            tables: dict[str, Any] = json.loads(json.dumps(source, default=str))
            return cls(tables, sets, run, needs_data=needs_data)
        path = None if source is None else Path(source)
        return cls(path, sets, run, needs_data=needs_data)

    @property
    def config(self) -> TrainingJob:
        """The job with every default filled in."""
        return self._loaded.job

    @property
    def warnings(self) -> list[str]:
        """Sentences about settings that have no effect or are unusual."""
        return self._loaded.warnings

    def train(
        self,
        *,
        out: str | Path | None = None,
        nproc: int | None = None,
        resume: str | Path | None = None,
        change: bool = False,
        plan: PlannedJob | str | Path | None = None,
        cluster: Cluster | str | Path | None = None,
        on_step: StepCallback | None = None,
        output: Output = "stderr",
    ) -> Run:
        """Train, and return the finished run; warn if its loss diverged.

        Args:
            out: directory of the run; None: runs/job-DATE-TIME.
            nproc: ranks to start on this machine; None: those of the plan, else one. Under
                torchrun this process is a rank already.
            resume: "auto" for the newest checkpoint of `out`, or the path of a checkpoint; None:
                a new run. The ranks, the plan and the `sets` of the run stay.
            change: take changes of what a resumed run learns, such as its schedule, batch or data.
            plan: a result of `plan`, or the path of a plan file; it sets ranks and layout.
            cluster: cluster to search for a layout on, as in `plan`; None: a job with
                `plan = "auto"`, or without a layout on several ranks, measures the machine first.
            on_step: function of each step's figures (`step`, `loss`, ...). It runs in this
                process, on rank 0 under torchrun. A false value other than None, also one of
                numpy or torch, ends the run after that step, with a checkpoint. Ranks wait for
                it, at most `train.collective_timeout_s`.
            output: stream for progress; None for none.
        """
        prepared = self.prepare(
            out=out, nproc=nproc, resume=resume, change=change, plan=plan, output=output,
            cluster=cluster,
        )  # fmt: skip
        texts = prepared.warnings + prepared.warn_of_memory()
        for text in texts if is_leader() else ():
            warnings.warn(text, stacklevel=2)
        prepared.check_machine()
        run = prepared.run(on_step)
        failure = failure_in(run.summary()) if is_leader() else None
        if failure is not None:
            warnings.warn(failure, stacklevel=2)
        return run

    def plan(
        self,
        cluster: Cluster | str | Path,
        *,
        nproc: int | None = None,
        plan: PlannedJob | str | Path | None = None,
        loads: str | Path | None = None,
        search: bool = False,
        method: str = "best-first",
        max_work: int | None = SEARCH_WORK,
        is_shown: bool = False,
    ) -> PlannedJob:
        """Return the plan of this job on a cluster, with its predictions; nothing runs.

        `figures` of the result has time, memory and price as plain data, and `plan.to_json()` is
        the content of a plan file.

        Args:
            cluster: hosts, devices and links: also a preset such as "2xh100-8", or a path.
            nproc: number of ranks; None: all that the cluster has room for.
            plan: plan to predict as it is; None: choose the settings that the job leaves open.
            loads: directory of a run whose last expert loads are assumed; None: even loads.
            search: find the fastest layout that fits; keys that the job writes stay. If none fits,
                `figures["fits"]` is False, and `figures["remedy"]` says what helps.
            method: method of the search, as in `moesaic plan --method`.
            max_work: work after which the search stops, in milliseconds of one core of the machine
                of the records; None: when it ends.
            is_shown: show the progress of a long search on stderr.
        """
        from moesaic.policy.plan.predict import choose_plan, predict_plan

        loaded, cluster = self._language_model(plan), Cluster.of(cluster)
        recorded = None if loads is None else self._loads(loads)
        if search:
            searched = self._search_facts(loaded, cluster, nproc, method, max_work, recorded)
            with cluster.named_in_errors(), blame_sets(loaded.origin, loaded.sets):
                planned = search_job(searched, is_shown=is_shown)
            return planned._replace(warnings=[*loaded.warnings, *planned.warnings])
        if loaded.has_open_micro_batches and loaded.plan is None:
            raise ConfigError(
                f'{loaded.origin}: train.micro_batches = "auto" needs a search: add --search '
                "(search=True), or give a number"
            )
        origin = loaded.plan_origin or loaded.origin
        with cluster.named_in_errors(), blame_sets(loaded.origin, loaded.sets):
            choices, facts = choose_plan(
                loaded.job, cluster.facts, nproc, loaded.plan, origin, recorded
            )
            tiers = None
            if loaded.job.memory is not None:
                device = facts.tightest_rank(choices.plan).device
                tiers = forecast(loaded.job, choices.plan, int(device.usable_bytes))
            planned = predict_plan(choices, facts, tiers)
        return self._with_remedy(planned, loaded, cluster, recorded, is_shown=is_shown)

    def _with_remedy(
        self,
        planned: PlannedJob,
        loaded: LoadedJob[LanguageModelJob],
        cluster: Cluster,
        loads: RecordedLoads | None,
        *,
        is_shown: bool,
    ) -> PlannedJob:
        """Return a planned job with the warnings of its file and, if it does not fit, a remedy."""
        if not planned.figures["fits"]:
            from moesaic.policy.plan.remedy import with_remedy

            facts = self._search_facts(
                loaded, cluster, planned.plan.ranks, "best-first", None, loads
            )
            planned = with_remedy(planned, search_remedy(facts, is_shown=is_shown))
        return planned._replace(warnings=[*loaded.warnings, *planned.warnings])

    def cheapest_part(
        self,
        cluster: Cluster | str | Path,
        *,
        floor: float | None = None,
        method: str = "best-first",
        loads: str | Path | None = None,
        max_work: int | None = SEARCH_WORK,
        is_shown: bool = False,
    ) -> PartChoice:
        """Return the part of a cluster to take for this job, with its plan; nothing runs.

        Args:
            cluster: hosts, devices, links and prices.
            floor: least tokens a second, at the least price per token; None: the part with the
                least price per hour on which the job fits.
            method: method of the searches, one for each part.
            loads: as in `plan`.
            max_work: work of a search, as in `plan`; searches of parts share it.
            is_shown: show progress on stderr.
        """
        loaded, cluster = self._language_model(), Cluster.of(cluster)
        recorded = None if loads is None else self._loads(loads)
        facts = self._search_facts(loaded, cluster, None, method, max_work, recorded)
        with cluster.named_in_errors(), blame_sets(loaded.origin, loaded.sets):
            return choose_part(facts, floor, is_shown=is_shown)

    def _loads(self, run: str | Path) -> RecordedLoads:
        return recorded_loads(Run.open(run).directory, self._language_model().job)

    def _search_facts(
        self,
        loaded: LoadedJob[LanguageModelJob],
        cluster: Cluster,
        nproc: int | None,
        method: str,
        max_work: int | None,
        loads: RecordedLoads | None,
    ) -> SearchFacts:
        with cluster.named_in_errors(), blame_sets(loaded.origin, loaded.sets):
            return facts_of_search(
                loaded, cluster.facts, nproc=nproc, method=method, max_work=max_work, loads=loads
            )

    def largest_model(
        self, cluster: Cluster | str | Path, ssd_bytes: float, *, nproc: int | None = None
    ) -> dict[str, Any]:
        """Return the largest models of this job's shape on a cluster as plain data; nothing runs.

        Args:
            cluster: hosts and devices.
            ssd_bytes: space on the drive of each host.
            nproc: number of ranks; None: all that the cluster has room for.
        """
        from moesaic.policy.plan.capacity import largest_model

        loaded, cluster = self._language_model(), Cluster.of(cluster)
        with cluster.named_in_errors(), blame_sets(loaded.origin, loaded.sets):
            return largest_model(loaded.job, cluster.facts, ssd_bytes, nproc, loaded.origin)

    def largest_in_memory(
        self, cluster: Cluster | str | Path, *, nproc: int | None = None, is_shown: bool = False
    ) -> dict[str, Any]:
        """Return the largest model of this job's shape that some layout fits into the devices'
        memory, as plain data: by experts per layer, or by layers if it is dense. Nothing runs.

        Arguments are those of `plan`.
        """
        loaded, cluster = self._language_model(), Cluster.of(cluster)
        facts = self._search_facts(loaded, cluster, nproc, "best-first", SEARCH_WORK, None)
        with cluster.named_in_errors(), blame_sets(loaded.origin, loaded.sets):
            return search_largest(facts, is_shown=is_shown)

    def prepare(
        self,
        *,
        out: str | Path | None = None,
        nproc: int | None = None,
        resume: str | Path | None = None,
        change: bool = False,
        plan: AnyPlan | None = None,
        output: Output = "stderr",
        is_started: bool = True,
        cluster: Cluster | str | Path | None = None,
    ) -> PreparedRun:
        """Return a run that can start, after all checks that need no torch.

        With `is_started` false it need not start here: a plan may have ranks on several hosts. A
        search for the layout then happens here, on `cluster`. Other arguments are those of `train`.
        """
        cluster = None if cluster is None else Cluster.of(cluster)
        if change and resume is None:
            raise ConfigError(
                "--change (change=True in Python) is for a run to resume: add --resume "
                "(resume='auto'), or remove it"
            )
        directory, checkpoint = resolve_run(None if out is None else Path(out), resume)
        run = resumed_run(
            None if out is None else str(out), None if resume is None else str(resume)
        )
        if run is not None and run != self._run:
            return Job(self._source, self._sets, run).prepare(
                out=out, nproc=nproc, resume=resume, change=change, plan=plan, output=output,
                is_started=is_started, cluster=cluster,
            )  # fmt: skip
        if directory is None and not is_torchrun():
            directory = default_out(self._source)
        loaded, ranks, searches, plan = self._choose_layout(plan, nproc, is_started, cluster)
        if run is not None and checkpoint is not None and not change:
            check_learning(run, loaded.job.model_dump(mode="json"))
        used_plan = loaded.plan or own_plan(loaded, ranks, is_open=searches)
        if directory is not None:
            check_out_is_not_data(directory, loaded.job)
        check_inputs(loaded, run)
        texts = run_warnings(loaded, used_plan, is_new=checkpoint is None, is_open=searches)
        if run is not None:
            files = [Path(one) for one in (self._source, plan) if isinstance(one, str | Path)]
            now = loaded.job.model_dump(mode="json")
            texts += unkept_changes(run, now, ranks, files, self._sets)
        if run is not None and checkpoint is None and not holds_failed_try(run):
            texts.append(f"'{run}' has no checkpoint to resume from: starting a new run")
        if directory is not None and is_leader():
            check_writable(directory)
            texts += disk_warnings(directory, loaded.job)
        task = TrainTask(
            job=str(self._source) if isinstance(self._source, Path) else self._source,
            sets=list(self._sets), out=None if directory is None else str(directory),
            resume=checkpoint, output=output, command=sys.argv, plan=_plan_as_json(plan),
            run=None if run is None else str(run), change=change,
            search=searches, cluster=cluster.to_dict() if searches and cluster else None,
        )  # fmt: skip
        return PreparedRun(task, loaded.job, used_plan, ranks, texts)

    def _choose_layout(
        self,
        plan: AnyPlan | None,
        nproc: int | None,
        is_started: bool,
        cluster: Cluster | None,
    ) -> tuple[LoadedJob[TrainingJob], int, bool, AnyPlan | None]:
        """Return the job under its plan, the ranks, whether they search for the layout, and the
        plan. A resumed run keeps its ranks, and its plan if the job still agrees with it."""
        given = self._under(plan)
        began = None if self._run is None else RunSource.read(self._run)
        earlier = earlier_plan(began)
        ranks = count_ranks(given, nproc, is_started=is_started, cluster=cluster, earlier=earlier)
        searches = check_search(given, ranks, cluster)
        if plan is None and began is not None and (searches or began.has_plan):
            plan = kept_plan(self._loaded, began, ranks)
        elif searches and not is_started and cluster is not None:
            plan = self.plan(cluster, nproc=ranks, search=True)
        if plan is not None and searches:
            ranks, searches = count_ranks(self._under(plan), nproc, is_started=is_started), False
        return self._under(plan), ranks, searches, plan

    def _under(self, plan: AnyPlan | None) -> LoadedJob[TrainingJob]:
        """Return the job under a plan, if there is one."""
        source = _plan_as_json(plan)
        if source is None:
            return self._loaded
        return apply_plan(self._loaded, Path(source) if isinstance(source, str) else source)

    def _language_model(
        self, plan: PlannedJob | str | Path | None = None
    ) -> LoadedJob[LanguageModelJob]:
        """Return the job under a plan, if there is one; raise if it is of another kind."""
        return language_model(
            self._under(plan), "has no plan: plans are for language models yet, train it as it is"
        )


def _plan_as_json(plan: AnyPlan | None) -> str | dict[str, Any] | None:
    """Return the path of a plan, or its content."""
    if plan is None or isinstance(plan, str | Path):
        return None if plan is None else str(plan)
    if isinstance(plan, Mapping):
        return dict(plan)
    content: dict[str, Any] = json.loads(plan.plan.to_json())
    return content
