"""Expert loads that a run recorded, as a table and checked against a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job, ModelConfig

if TYPE_CHECKING:
    import pyarrow as pa

    from moesaic.policy.plan.choices import RecordedLoads
    from moesaic.report.loads import Loads


def latest_loads(run: Path) -> pa.Table | None:
    """Return the loads of each step and layer, in order; None if nothing is recorded.

    A resumed run repeats steps: the last row of each is valid. Rows without counts by rank belong
    to other pipeline ranks.
    """
    import pyarrow as pa

    from moesaic.base.records import read_records

    tables = list(read_records(run / "loads"))
    if not tables:
        return None
    whole = pa.concat_tables(tables, promote_options="default")
    numbered = whole.append_column("row", pa.array(range(whole.num_rows)))
    valid = numbered.group_by(["step", "layer"]).aggregate([("row", "max")])
    return whole.take(valid["row_max"]).sort_by([("step", "ascending"), ("layer", "ascending")])


def recorded_loads(run: Path, job: Job) -> RecordedLoads:
    """Return the expert loads of each layer over the last quarter of the recorded steps."""
    from moesaic.policy.plan.choices import RecordedLoads
    from moesaic.report import RunStats

    loads = RunStats.read(run).loads
    if loads is None:
        raise ConfigError(
            f"'{run}' has recorded no expert loads, like every run of a dense model: take the "
            "loads of another run, or of none"
        )
    mismatch = find_loads_mismatch(loads, job.model)
    if mismatch is not None:
        raise ConfigError(f"'{run}' {mismatch}: take the loads of a run of this model, or of none")
    return RecordedLoads(str(run), list(loads.recent))


def find_loads_mismatch(loads: Loads, model: ModelConfig) -> str | None:
    """Return why recorded loads cannot stand for `model`; None if they can."""
    layers, experts = loads.recent.shape
    if (layers, experts) == (len(model.expert_layers), model.experts):
        idle = loads.layers[loads.recent.sum(axis=1) == 0].tolist()
        if not idle:
            return None
        return f"has no tokens of layer {idle[0]} in the last quarter of its recorded steps"
    dense = f", model.dense_layers = {model.dense_layers}" if model.dense_layers else ""
    return (
        f"has the loads of {experts} experts in each of {layers} layers, but model.experts = "
        f"{model.experts} and model.layers = {model.layers}{dense}"
    )
