"""`bench soak`: what it draws, that it runs between ranks, and that it sees what is wrong."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
import torch

from titan_megamoe import ConfigError
from titan_megamoe.bench import records
from titan_megamoe.bench import soak as bench
from titan_megamoe.testing import soak as worker
from titan_megamoe.testing.soak import ROUTINGS, Soak, draw_ids, inputs_of, part, repeat, tokens_of

SMALL = Soak(ranks=1, backend="reference", tokens=48, hidden=64, intermediate=96, experts=4, top_k=2)


def _run(tmp_path: Path, *more: object) -> tuple[int, dict]:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    out = tmp_path / "soak.json"
    sizes = "--tokens 48 --hidden 64 --intermediate 96 --experts 4 --top-k 2 --steps 24 --check-every 8"
    given = [*sizes.split(), "--repeats", "3", "--out", str(out), *map(str, more)]
    code = bench.run(parser.parse_args(given))
    return code, records.read(out)[0] if out.exists() else {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the ranks take GPUs")
def test_ranks_on_cpus_fail_or_are_not_recorded(tmp_path) -> None:
    code, record = _run(tmp_path, "--backend", "all_to_all")
    assert code == 0 and record["wrong"] == []
    assert (record["kind"], record["impl"], record["ep"]) == ("soak", "all_to_all", 2)
    assert (record["steps"], record["samples"], sum(record["routings"].values())) == (24, 3, 24)
    assert all(0 < record["errors"][n] <= record["limits"][n] for n in worker.RESULT_NAMES)


def test_every_kind_of_step_is_drawn() -> None:
    soak = Soak(ranks=2)
    drawn = [[tokens_of(soak, step, rank) for rank in range(2)] for step in range(1000)]
    assert {0, soak.tokens} <= {t for pair in drawn for t in pair}
    assert drawn[25] == [0, 0] and sum(a != b for a, b in drawn) > 900
    assert {worker.routing_of(soak, step) for step in range(100)} == set(ROUTINGS)
    assert [tokens_of(Soak(ranks=2, seed=1), s, 0) for s in range(9)] != [d[0] for d in drawn[:9]]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_routing_draws_other_experts_than_it_says(routing) -> None:
    soak = Soak(ranks=4)
    ids = draw_ids(soak, routing, 400, torch.Generator().manual_seed(0))
    assert ids.shape == (400, 4) and ids.max() < 16 and ids.min() >= -1
    share = {"first rank": ids < 4, "last rank": ids >= 12, "hot": ids == 8, "dropped": ids == -1}
    low = {"first rank": 1.0, "last rank": 1.0, "hot": 0.48, "dropped": 0.28}
    if routing in share:
        assert share[routing].float().mean() >= low[routing]
    else:
        assert all(len(set(row)) == 4 for row in ids.tolist())
    assert (ids == -1).any() == (routing == "dropped")


def test_ranks_make_other_inputs_of_a_peer() -> None:
    ours, theirs = (inputs_of(SMALL, 3, 0, torch.device("cpu")) for _ in range(2))
    assert torch.equal(ours.x, theirs.x) and torch.equal(ours.ids, theirs.ids)
    other = inputs_of(SMALL, 4, 0, torch.device("cpu"))
    assert other.x.shape != ours.x.shape or not torch.equal(other.x, ours.x)


def _part() -> worker.Part:
    worker._layers.cache_clear()
    return part(0, SMALL, 0, 3)


def test_no_step_is_recomputed(monkeypatch) -> None:
    right, calls = worker.mega_moe, []
    monkeypatch.setattr(worker, "mega_moe", lambda *given, **how: calls.append(0) or right(*given, **how))
    _part()
    assert len(calls) == 4


def test_a_right_op_is_found_wrong() -> None:
    made = _part()
    assert made.finite and made.steps == 3
    found = bench.accuracy([made.sums], SMALL)
    assert all(of.fine and of.error > 0 for of in found.values())


def test_a_wrong_result_or_gradient_passes(monkeypatch) -> None:
    right = worker.mega_moe
    monkeypatch.setattr(worker, "mega_moe", lambda x, *more, **how: right(x * 1.01, *more, **how))
    found = bench.accuracy([_part().sums], SMALL)
    assert not any(found[name].fine for name in ("y", "dx", "dw1"))


def test_one_wrong_step_drowns_in_many_right_ones() -> None:
    right = _part().sums
    wrong = [list(row) for row in right]
    at = worker.SUMS.index("ours to exact")
    wrong[0][at] *= 64
    found = bench.accuracy([right] * 500 + [wrong], SMALL)
    assert found["y"].error < found["y"].limit, "the mean does not see it"
    assert not found["y"].fine and found["dx"].fine


def test_a_value_that_is_not_finite_passes(monkeypatch) -> None:
    right = worker.mega_moe
    monkeypatch.setattr(worker, "mega_moe", lambda *given, **how: right(*given, **how) * math.inf)
    made = _part()
    assert not made.finite
    assert not bench.accuracy([made.sums], SMALL)["y"].fine


def test_other_bits_in_a_repeat_pass(monkeypatch) -> None:
    worker._layers.cache_clear()
    assert repeat(0, SMALL, 3) == []
    right, calls = worker.mega_moe, []

    def sometimes(*given, **how):
        calls.append(0)
        return right(*given, **how) * (1.0 if len(calls) != 3 else 1.01)

    monkeypatch.setattr(worker, "mega_moe", sometimes)
    assert "y of repeat 2" in repeat(0, SMALL, 4)


def test_more_ranks_than_devices_start_anyway(tmp_path) -> None:
    with pytest.raises(ConfigError, match="needs 64 GPUs"):
        _run(tmp_path, "--ranks", 64, "--experts", 64)
    with pytest.raises(ConfigError, match="no multiple"):
        _run(tmp_path, "--ranks", 3, "--backend", "all_to_all")
