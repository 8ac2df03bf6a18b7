"""Click files on several ranks: cached once, and each rank loads its own samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.base.errors import UserError
from moesaic.dist.world import World
from moesaic.facts.job.clicks import ClicksConfig
from moesaic.testing.ranks import RankPool
from moesaic.train.data.clicks import ClickData


def write(path: Path, num: int = 40) -> Path:
    lines = ["\t".join([str(n % 2), *[str(n)] * 13, *[f"key{n}"] * 26]) for n in range(num)]
    path.write_text("\n".join(lines))
    return path


def load_share(world: World, config: ClicksConfig) -> Any:
    """Return the digest, the log, and dense features and keys of this rank's samples; or the
    error."""
    log = list[str]()
    try:
        data = ClickData.open(config, 3, world, log.append)
    except UserError as error:
        return str(error)
    size = 60 // world.size
    batch = data.train.load(range(world.rank * size, (world.rank + 1) * size), shuffled=True)
    keys = batch.keys.reshape(26, size).T.tolist()
    return data.digest, log, list(zip(batch.dense.tolist(), keys, strict=True))


def test_ranks_load_their_own_samples(ranks: RankPool, tmp_path: Path) -> None:
    file = write(tmp_path / "day")
    file.write_text(file.read_text() + "\nno sample")
    config = ClicksConfig(path=str(file), cache=str(tmp_path / "cache"), max_bad_lines=1)
    first, second = ranks.run(2, load_share, config)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    digest, log, samples = load_share(World.solo(), config)
    assert (first[0], second[0]) == (digest, digest)
    assert (first[1], second[1]) == (log, [])
    assert first[2] + second[2] == samples
    errors = ranks.run(2, load_share, config.model_copy(update={"max_bad_lines": 0}))
    assert errors == [errors[0]] * 2
    assert "'day' line 41: 1 fields instead of 40" in errors[0].replace(f"{tmp_path}/", "")
