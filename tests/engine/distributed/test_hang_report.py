"""A rank that waits for another one names the line where it waits, and writes its stacks."""

import re
import signal

from engine.distributed import host_group, stop_signals
from tests.helpers import kit
from tests.helpers.stopping import begin, check_stopped, recipe


def test_stopped_rank_is_found_by_the_rank_that_waits_for_it(tiny, tmp_path, monkeypatch):
    """Rank 1 stands still, as on a machine that swaps; it continues later, and the run is as sound as before."""
    monkeypatch.setattr(stop_signals, "HANG_SHARE", 0.01)
    monkeypatch.setattr(stop_signals, "WAKE_SECONDS", 0.1)
    ranks, stacks = begin(tmp_path, recipe(tiny, ddp_timeout=300)), tmp_path / "run" / "logs" / "stacks_rank_0.txt"
    ranks.signal(signal.SIGSTOP, 1)
    kit.until(lambda: stacks.exists() and "rank 0 has made no progress" in ranks.text())
    line = re.search(r"rank 0 has made no progress for \d+ s; it is in (.*); stacks: (\S+)\.", ranks.text())
    assert re.fullmatch(r"\w+ \((engine|src|train)\S*\.py:\d+\)", line[1]), line[1]
    assert stacks.samefile(tmp_path / line[2])
    assert "train.py" in stacks.read_text()
    ranks.signal(signal.SIGCONT, 1)
    ranks.signal(signal.SIGTERM)
    check_stopped(ranks, tmp_path / "run")


def test_report_on_a_disk_that_takes_no_stacks(tmp_path, capfd):
    host_group.report_hang(0, 150.0, tmp_path / "deleted" / "stacks.txt")
    assert "rank 0 has made no progress" in capfd.readouterr().err
