"""Theme `serve`: the inference engine against llama.cpp, transformers, accelerate and limits.

Every arm is a process in a control group of its own, whose limit includes page cache. Arms process
the same tokens in turn: those that moesaic draws. serve.md says how to install the peers.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.memory_group import Arm, Killed, can_limit, started
from benchmarks.serve_models import GGUF, Shape, write_model
from moesaic.base import direct_io

PYTHON = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    / "moesaic" / "peers" / "llama" / "bin" / "python"
)  # fmt: skip
"""Interpreter of the environment of all peers."""
VLLM = PYTHON.parents[2] / "vllm"
"""Environment of vLLM."""
MODELS = measure.ROOT / "build" / "serve-models"
LARGE = Shape()
OLMOE = Shape("olmoe", layers=4, ffn=1024, top_k=8, kv_heads=16, vocab=32_000)
SPOKEN = Shape("olmoe", layers=4, ffn=1024, top_k=8, kv_heads=16, vocab=260)
"""A model that writes bytes, so that the server needs no tokenizer."""
STREAMS = 32
WIDE = Shape(layers=4, hidden=2048, ffn=1024, experts=16, kv_heads=4)
THREADS = 2
PROMPT, TOKENS, MAX_ROUNDS = 16, 64, 5
LIMITED_TOKENS = 24
"""Tokens with less memory than the model, which peers need seconds for."""
SLOW_TOKENS = 8
"""Tokens of accelerate, which takes a second for each."""
FACTORS = (1, 2, 4, 8)
"""Multiples of the limit that sides try which the kernel ends."""
WHERE = "control groups of version 1 and root are needed"
MISSING = f"no peers in {PYTHON.parents[1]}; benchmarks/serve.md says how to install them"
Answers = dict[str, list[dict[str, Any]]]


def model(shape: Shape) -> Path:
    """Return the directory of a model, which is written on first use."""
    directory = MODELS / f"{shape.family}-{shape.layers}x{shape.hidden}-{shape.vocab}"
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_model(directory, shape)
    if shape.family == "mixtral" and not (directory / GGUF).exists():
        subprocess.run([str(PYTHON), "benchmarks/serve_models.py", str(directory)], check=True)
    return directory


def evict(directory: Path) -> None:
    """Remove a model's files from the page cache."""
    os.sync()
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def work(
    seed: int, streams: int, prompt: int, tokens: int, vocab: int = LARGE.vocab
) -> dict[str, Any]:
    """Return what moesaic is asked for."""
    words, first = random.Random(seed), min(259, vocab // 4)
    prompts = [[words.randrange(first, vocab) for _ in range(prompt)] for _ in range(streams)]
    return {"seed": seed, "prompts": prompts, "tokens": tokens}


class Side:
    """An arm of the comparison, and how many tokens it is asked for."""

    def __init__(self, command: Sequence[str], tokens: int = TOKENS) -> None:
        self.command, self.tokens = list(command), tokens
        self.idle_bytes = 0
        """Peak of an idle interpreter, which a limit leaves room for."""

    def start(self, limit_bytes: int = 0) -> Arm:
        """Start the process."""
        return Arm(self.command, limit_bytes)

    def request(self, request: dict[str, Any], texts: Sequence[list[int]]) -> dict[str, Any]:
        """Return what the arm is asked for: the same request, or given texts for a peer."""
        if "-m" in self.command:
            return request
        given = [text[: self.tokens][:-1] for text in texts]
        return {"prompts": request["prompts"], "texts": given}


def moesaic(path: Path | None, **settings: Any) -> Side:
    """Return moesaic's side; without a path, an idle interpreter."""
    raw = {"threads": THREADS, "precision": "keep", "positions": 1024, "streams": 1, **settings}
    if path is not None:
        raw["path"] = str(path)
    return Side([sys.executable, "-m", "benchmarks.serve_arm", json.dumps(raw)])


def llama(path: Path, streams: int = 1) -> Side:
    """Return llama.cpp's side."""
    raw = {"path": str(path / GGUF), "positions": 1024, "streams": streams, "threads": THREADS}
    script = str(Path(__file__).with_name("serve_llama.py"))
    return Side([str(PYTHON), script, json.dumps(raw)])


def transformers(path: Path, tokens: int = TOKENS, **settings: Any) -> Side:
    """Return the side of transformers; with `offload`, that of accelerate."""
    raw = {"path": str(path), "threads": THREADS, "dtype": "bfloat16", **settings}
    script = str(Path(__file__).with_name("serve_transformers.py"))
    return Side([str(PYTHON), script, json.dumps(raw)], tokens)


def vllm(path: Path, streams: int, dtype: str) -> Side:
    """Return the side of vLLM's CPU build."""
    raw = {"path": str(path), "streams": streams, "dtype": dtype}
    settings = (
        f"LD_PRELOAD={VLLM / 'lib' / 'libiomp5.so'}", "VLLM_ENABLE_V1_MULTIPROCESSING=0",
        "VLLM_CPU_KVCACHE_SPACE=2", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1",
        f"OMP_NUM_THREADS={THREADS}", f"PATH={VLLM / 'bin'}{os.pathsep}{os.environ['PATH']}",
    )  # fmt: skip
    script = str(Path(__file__).with_name("serve_vllm.py"))
    python = str(VLLM / "bin" / "python")
    return Side(["env", *settings, python, script, json.dumps(raw)])


def idle_bytes(side: Side) -> int:
    """Return the peak of an interpreter that has imported what the side needs."""
    code = "import llama_cpp" if "serve_llama.py" in side.command[1] else "import transformers"
    command = [side.command[0], "-c", f"{code}; print('{{}}', flush=True); input()"]
    if side.command[1] == "-m":
        command = moesaic(None).command
    with started(partial(Arm, command)) as arm:
        return arm.peak_bytes


def in_turn(
    arms: dict[str, Arm], sides: dict[str, Side], requests: Sequence[dict[str, Any]]
) -> Answers:
    """Let all arms process each request in turn; moesaic, the first, draws the tokens."""
    answers: Answers = {name: [] for name in arms}
    for index, request in enumerate(requests):
        ours = arms["moesaic"].step(request)
        answers["moesaic"].append(ours)
        names = [name for name in arms if name != "moesaic"]
        for name in names if index % 2 else names[::-1]:
            given = sides[name].request(request, ours["texts"])
            answers[name].append(arms[name].step(given))
    return answers


def check_tokens(arms: dict[str, Arm], sides: dict[str, Side], streams: int) -> None:
    """Raise unless moesaic and llama.cpp mostly find the same tokens most likely.

    Random weights make near-ties common, which rounding to bf16 decides."""
    request = {**work(0, streams, PROMPT, LIMITED_TOKENS), "check": True}
    ours = arms["moesaic"].step(request)
    for name, arm in arms.items():
        if name == "moesaic":
            continue
        answer = arm.step({**sides[name].request(request, ours["texts"]), "check": True})
        if name == "llama.cpp":
            same = np.mean(np.equal(answer["best"], ours["best"][1:]))
            if same < 0.75:
                raise RuntimeError(f"moesaic and llama.cpp agree in {same:.0%} of tokens only")


def per_token(answers: Sequence[dict[str, Any]], tokens: int) -> list[float]:
    """Return seconds of a decoding step; the first token comes with the prompt."""
    return [one["decode_s"] / (tokens - 1) for one in answers]


def ratio(
    name: str, bar: str, theirs: Sequence[float], ours: Sequence[float], against: str
) -> measure.Row:
    """Return the row of a peer's seconds over moesaic's."""
    ratios = np.divide(theirs, ours)
    return measure.row(
        name, float(np.median(ratios)), "ratio", bar=bar, interval=measure.bootstrap(ratios),
        repeats=len(ratios), against=against,
    )  # fmt: skip


def drive_share(answers: Sequence[dict[str, Any]], bandwidth: float) -> list[float]:
    """Return the share of decoding and prompts in which the drive could not be faster."""
    return [one["read_bytes"] / bandwidth / (one["decode_s"] + one["prefill_s"]) for one in answers]


def read_bandwidth(directory: Path, block_bytes: int) -> float:
    """Return bytes per second of four threads that read blocks of a model's file."""
    path = max(directory.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    size = direct_io.align(block_bytes)
    places = range(0, path.stat().st_size - size, size)
    chosen = random.Random(0).sample(places, min(200, len(places)))
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(4) as pool:
        direct_io.set_direct_io(file, True)
        pages = [memoryview(mmap.mmap(-1, size)) for _ in range(4)]

        def read(thread: int) -> None:
            for place in chosen[thread::4]:
                direct_io.read_at(file, pages[thread], place)

        began = time.perf_counter()
        list(pool.map(read, range(4)))
        return len(chosen) * size / (time.perf_counter() - began)


@contextmanager
def offload_directory() -> Iterator[str]:
    """Yield a new directory on the drive of the models."""
    directory = tempfile.mkdtemp(dir=MODELS, prefix="offload-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def limited(share: float, streams: int, path: Path, *, slow: str | None) -> dict[str, Side]:
    """Return all sides of a comparison, each with a limit of a share of the model's memory."""
    limit = int(share * LARGE.num_bytes)
    idle = idle_bytes(moesaic(None))
    sides = {
        "moesaic": moesaic(path, streams=streams, memory=limit + idle),
        "llama.cpp": llama(path, streams),
    }
    if slow is not None:
        sides["accelerate"] = transformers(path, SLOW_TOKENS, offload=slow)
    for name, side in sides.items():
        side.idle_bytes = idle if name == "moesaic" else idle_bytes(side)
    return sides


def surviving(side: Side, limit: int) -> tuple[Arm, int]:
    """Return the arm of a side, under the smallest multiple of the limit that its start survives,
    and the multiple."""
    for factor in FACTORS:
        try:
            return side.start(factor * limit + side.idle_bytes), factor
        except Killed:
            continue
    raise RuntimeError(f"{side.command} does not start with {FACTORS[-1]} times {limit} bytes")


def compare_limited(
    share: float, streams: int, prompt: int, rounds: int, *, slow: str | None = None
) -> tuple[Answers, str]:
    """Return the answers of all sides under their limits, and a note on drive and slots."""
    path = model(LARGE)
    sides = limited(share, streams, path, slow=slow)
    limit = int(share * LARGE.num_bytes)
    before = read_bandwidth(path, 6 * LARGE.hidden * LARGE.ffn)
    evict(path)
    with ExitStack() as stack:
        arms, more = dict[str, Arm](), ""
        for name, side in sides.items():
            arms[name], factor = surviving(side, limit)
            stack.callback(arms[name].close)
            if factor > 1:
                more = f"; {name} got {factor} times its limit, the least of {FACTORS} it survives"
        check_tokens(arms, sides, streams)
        requests = [
            work(seed, streams, prompt, LIMITED_TOKENS)
            for seed in range(1, min(rounds, MAX_ROUNDS) + 1)
        ]
        answers = in_turn(arms, sides, requests)
        slots = arms["moesaic"].ready["slots"]
    after = read_bandwidth(path, 6 * LARGE.hidden * LARGE.ffn)
    shares = drive_share(answers["moesaic"], (before + after) / 2)
    reads = sum(one["read_bytes"] for one in answers["moesaic"])
    passes = sum(one["hits"] + one["misses"] for one in answers["moesaic"])
    misses = sum(one["misses"] for one in answers["moesaic"])
    note = (
        f"{limit / 1e6:.0f} MB of {LARGE.num_bytes / 1e6:.0f} and the interpreter; {slots} of "
        f"{LARGE.layers * LARGE.experts} experts have slots, {misses / passes:.0%} of uses miss, "
        f"{reads / 1e6 / len(requests):.0f} MB a round; the drive, {before / 1e9:.2f} and "
        f"{after / 1e9:.2f} GB/s, needs {np.median(shares):.0%} of moesaic's time{more}"
    )
    return answers, note


def can_compare(rows: Sequence[tuple[str, str]]) -> Iterator[measure.Row]:
    """Yield untried rows if the machine lacks control groups or peers."""
    why = WHERE if not can_limit() else "" if PYTHON.exists() else MISSING
    for name, bar in rows if why else ():
        yield measure.untried(name, bar, why)


def offload(rounds: int) -> Iterator[measure.Row]:
    """Decode one stream with a quarter and half of the model's memory."""
    names = [
        ("decode, one stream, a quarter of the memory, over llama.cpp", ">= 2.5"),
        ("decode, one stream, half of the memory, over llama.cpp", ">= 1.6"),
        ("decode, one stream, a quarter of the memory, over accelerate", ">= 6"),
        ("decode, one stream, half of the memory, over accelerate", ">= 10"),
    ]
    if untried := list(can_compare(names)):
        yield from untried
        return
    for index, share in enumerate((0.25, 0.5)):
        with offload_directory() as slow:
            answers, note = compare_limited(share, 1, PROMPT, rounds, slow=slow)
        ours = per_token(answers["moesaic"], LIMITED_TOKENS)
        for (name, bar), peer, tokens in (
            (names[index], "llama.cpp", LIMITED_TOKENS),
            (names[index + 2], "accelerate", SLOW_TOKENS),
        ):  # fmt: skip
            theirs = per_token(answers[peer], tokens)
            speeds = f"{1 / np.median(ours):.1f} and {1 / np.median(theirs):.1f} tokens/s"
            what = "llama.cpp with mmap" if peer == "llama.cpp" else "accelerate's disk offload"
            yield ratio(name, bar, theirs, ours, f"{what}: {speeds}; bf16, {note}")


def streams(rounds: int) -> Iterator[measure.Row]:
    """Decode eight streams, and process a prompt of 512, with a quarter of the memory."""
    names = [
        ("decode, eight streams, a quarter of the memory, over llama.cpp", ">= 1.5"),
        ("prompt of 512 tokens, a quarter of the memory, over llama.cpp", ">= 1.2"),
    ]
    if untried := list(can_compare(names)):
        yield from untried
        return
    answers, note = compare_limited(0.25, 8, PROMPT, rounds)
    ours, theirs = (per_token(answers[name], LIMITED_TOKENS) for name in ("moesaic", "llama.cpp"))
    yield ratio(*names[0], theirs, ours, f"llama.cpp with mmap; bf16, {note}")
    answers, note = compare_limited(0.25, 1, 512, rounds)
    ours, theirs = ([one["prefill_s"] for one in answers[n]] for n in ("moesaic", "llama.cpp"))
    yield ratio(*names[1], theirs, ours, f"llama.cpp with mmap; bf16, {note}")


def resident(rounds: int) -> Iterator[measure.Row]:
    """Decode with all weights in memory, over vLLM, transformers and llama.cpp."""
    names = [
        ("decode, all in memory, 1, 8 and 32 streams, over transformers", ">= 2.5"),
        ("decode, all in memory, 1, 8 and 32 streams, over vLLM", ">= 1.2"),
        ("decode, all in memory, hidden 2,048, one stream, over llama.cpp", ">= 0.85"),
    ]
    if not PYTHON.exists():
        yield from (measure.untried(name, bar, MISSING) for name, bar in names)
        return
    path, details = model(OLMOE), list[tuple[measure.Row, measure.Row | None]]()
    for number in (1, 8, 32):
        details.append(resident_rows(path, number, rounds))
    yield from measure.claim(*names[0], [row for row, _ in details])
    over_vllm = [row for _, row in details if row is not None]
    if over_vllm:
        yield from measure.claim(*names[1], over_vllm)
    else:
        yield measure.untried(*names[1], f"no vLLM in {VLLM}; serve.md says how to install it")
    path = model(WIDE)
    sides = {"moesaic": moesaic(path), "llama.cpp": llama(path)}
    answers = compare_resident(sides, 1, rounds)
    ours, theirs = (per_token(answers[name], TOKENS) for name in sides)
    speeds = f"{1 / np.median(ours):.1f} and {1 / np.median(theirs):.1f} tokens/s"
    yield ratio(*names[2], theirs, ours, f"llama.cpp, bf16 as moesaic: {speeds}")


def resident_rows(path: Path, number: int, rounds: int) -> tuple[measure.Row, measure.Row | None]:
    """Return the rows of some streams over transformers and, if it is installed, over vLLM."""
    sides = {
        "moesaic": moesaic(path, streams=number),
        "moesaic fp32": moesaic(path, streams=number, precision="fp32"),
        "transformers": transformers(path, 16, dtype="float32"),
    }
    if VLLM.exists():
        sides["vLLM"] = vllm(path, number, "bfloat16")
        sides["vLLM fp32"] = vllm(path, number, "float32")
    answers = compare_resident(sides, number, rounds)

    def fastest(*names: str) -> list[float]:
        found = [per_token(answers[name], sides[name].tokens) for name in names]
        return min(found, key=lambda seconds: float(np.median(seconds)))

    def speeds(*names: str) -> str:
        found = (np.median(per_token(answers[name], sides[name].tokens)) for name in names)
        return " and ".join(f"{number / seconds:.0f}" for seconds in found)

    ours = fastest("moesaic", "moesaic fp32")
    said = f"moesaic in bf16 and fp32: {speeds('moesaic', 'moesaic fp32')} tokens/s"
    name = f"decode, all in memory, {number} streams, over"
    over_transformers = ratio(
        f"{name} transformers", "", fastest("transformers"), ours,
        f"transformers, fp32, eager: {speeds('transformers')} tokens/s; {said}",
    )  # fmt: skip
    if "vLLM" not in sides:
        return over_transformers, None
    both = "vLLM", "vLLM fp32"
    return over_transformers, ratio(
        f"{name} vLLM", "", fastest(*both), ours,
        f"vllm-cpu 0.32.0, its faster of bf16 and fp32: {speeds(*both)} tokens/s; {said}",
    )  # fmt: skip


def compare_resident(sides: dict[str, Side], number: int, rounds: int) -> Answers:
    """Return the answers of all sides without limits."""
    with ExitStack() as stack:
        arms = {name: stack.enter_context(started(side.start)) for name, side in sides.items()}
        requests = [work(seed, number, PROMPT, TOKENS) for seed in range(min(rounds, MAX_ROUNDS))]
        check_tokens(arms, sides, number)
        return in_turn(arms, sides, requests)


def server(rounds: int) -> Iterator[measure.Row]:
    """Serve 32 streams for two minutes, over the same batch without a server, on one core each."""
    del rounds
    path = model(SPOKEN)
    offline = moesaic(path, streams=STREAMS, threads=1)
    with started(partial(Arm, ["taskset", "-c", "0", *offline.command])) as arm:
        arm.step(work(0, STREAMS, PROMPT, TOKENS, SPOKEN.vocab))
        before = batch_speeds(arm, 1)
        found = client_speed(path)
        after = batch_speeds(arm, 100)
    speeds = [*before, *after]
    ratios = [found["tokens_per_s"] / speed for speed in speeds]
    yield measure.row(
        "32 streams through the server for two minutes, over the same batch without it",
        float(np.median(ratios)), "ratio", bar=">= 0.9", interval=measure.bootstrap(ratios),
        repeats=len(ratios),
        against=f"the engine on the same core, {np.median(speeds):.0f} tokens/s; the server "
        f"{found['tokens_per_s']:.0f}, {found['requests']} requests, {found['errors']} errors, "
        f"the slowest stream had {found['least_share']:.2f} of the mean",
    )  # fmt: skip


def batch_speeds(arm: Arm, seed: int) -> list[float]:
    """Return tokens per second of batches of all streams, with their prompts."""
    answers = [
        arm.step(work(seed + one, STREAMS, PROMPT, TOKENS, SPOKEN.vocab)) for one in range(3)
    ]
    return [STREAMS * TOKENS / (one["decode_s"] + one["prefill_s"]) for one in answers]


def client_speed(path: Path) -> dict[str, float]:
    """Return what a client on the other core finds."""
    command = [
        "taskset", "-c", "0", sys.executable, "-m", "moesaic", "serve", str(path), "--json",
        "--set", "port=0", "--set", "name=model", "--set", f"max_running={STREAMS}",
        "--set", f"cache_tokens={STREAMS * 1024}", "--set", "tokenizer=bytes",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            raw = {
                "url": url, "streams": STREAMS, "seconds": 120, "tokens": TOKENS, "prompt": PROMPT,
            }  # fmt: skip
            client = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.serve_client"]
            done = subprocess.run(
                [*client, json.dumps(raw)], stdout=subprocess.PIPE, text=True, check=True
            )
        finally:
            process.terminate()
    found: dict[str, float] = json.loads(done.stdout)
    return found


def prefix(rounds: int) -> Iterator[measure.Row]:
    """Find a prompt of 1,024 tokens in the prefix cache."""
    path = model(OLMOE)
    side = moesaic(path, streams=2, positions=8192, prefix_cache=True)
    with started(side.start) as arm:
        arm.step(work(0, 1, 64, 1))
        ratios, seconds = list[float](), list[float]()
        for seed in range(1, min(rounds, 6) + 1):
            first, again = (arm.step(work(seed, 1, 1025, 1)) for _ in range(2))
            if again["prefix_hits"] < 1024:
                raise RuntimeError("the prefix cache has lost a prompt")
            ratios.append(again["prefill_s"] / first["prefill_s"])
            seconds.append(first["prefill_s"])
    yield measure.row(
        "time to the first token of a known prompt of 1,024 tokens, over an unknown one",
        float(np.median(ratios)), "ratio", bar="<= 0.1", interval=measure.bootstrap(ratios),
        repeats=len(ratios),
        against=f"the same prompt for the first time, {np.median(seconds):.2f} s",
    )  # fmt: skip


def forecasts(rounds: int) -> Iterator[measure.Row]:
    """Compare the forecast of a dry run with tokens per second."""
    name = "error of the forecast of tokens/s, median of eight points"
    if not can_limit():
        yield measure.untried(name, "<= 0.15", WHERE)
        return
    cases = [(LARGE, 1.5), (LARGE, 0.5), (LARGE, 0.25), (OLMOE, 1.5)]
    details = list[measure.Row]()
    with offload_directory() as directory:
        cluster = Path(directory) / "cluster.toml"
        probe = ["probe", "--nproc", "1", "--out", str(cluster)]
        sets = {"seconds": "20", "dtypes": '["bf16"]', "disks": json.dumps([str(MODELS)])}
        moesaic_command(probe, sets)
        for shape, share in cases:
            details += [
                forecast_row(shape, share, number, cluster, min(rounds, 3)) for number in (1, 8)
            ]
    errors = [abs((row.value or 0.0) - 1) for row in details]
    yield measure.row(
        name, float(np.median(errors)), "share", bar="<= 0.15", repeats=len(errors),
        against=f"the engine's own speed; the largest error is {max(errors):.2f}",
    )  # fmt: skip
    yield from details


def forecast_row(
    shape: Shape, share: float, number: int, cluster: Path, rounds: int
) -> measure.Row:
    """Return the forecast over the measured speed of one case."""
    path = model(shape)
    memory = int(share * shape.num_bytes) + idle_bytes(moesaic(None))
    side = moesaic(path, streams=number, memory=memory)
    evict(path)
    with started(partial(side.start, memory)) as arm:
        arm.step(work(0, number, PROMPT, TOKENS))
        answers = [arm.step(work(seed, number, PROMPT, TOKENS)) for seed in range(1, rounds + 1)]
    speeds = [number / seconds for seconds in per_token(answers, TOKENS)]
    sets = {
        "memory": f'"{memory}B"', "max_running": str(number), "tokenizer": '"bytes"',
        "cache_tokens": str(1024 * number),
    }  # fmt: skip
    told = moesaic_command(
        ["serve", str(path), "--dry-run", "--json", "--cluster", str(cluster)], sets
    )
    predicted = {one["streams"]: one for one in json.loads(told)["speeds"]}[number]
    ratios = predicted["tokens_per_s"] / np.asarray(speeds)
    return measure.row(
        f"forecast over measured tokens/s, {shape.family}, {min(share, 1.0):.0%} of its memory, "
        f"{number} streams",
        float(np.median(ratios)), "ratio", bar="", interval=measure.bootstrap(ratios),
        repeats=len(ratios),
        against=f"{np.median(speeds):.1f} tokens/s; {predicted['bottleneck']} is the bottleneck "
        "of the forecast",
    )  # fmt: skip


def moesaic_command(words: Sequence[str], sets: dict[str, str]) -> str:
    """Run a command of moesaic; return what it prints."""
    flags = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "moesaic", *words, *flags]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


PARTS = {
    "offload": offload, "streams": streams, "resident": resident, "server": server,
    "prefix": prefix, "forecasts": forecasts,
}  # fmt: skip
