"""`bench/fleet/check.py`: what the simulator predicts, beside what an engine does."""

import re
import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).parents[3] / "bench" / "fleet" / "check.py"


def test_an_engine_is_measured_and_predicted() -> None:
    options = ["engine", "sim:fixed-4ms", "--seconds", "0.4", "--rounds", "1"]
    ran = subprocess.run([sys.executable, CHECK, *options], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", ran.stdout, re.MULTILINE))
    assert {"1 streams, fitted", "4 streams, fitted", "8 streams", "16 streams, fitted", "32 streams"} < set(rows)
    for streams in (8, 32):
        real, simulated = (float(each) for each in re.findall(r"([\d.]+) / ([\d.]+)", rows[f"{streams} streams"])[0])
        assert 0.5 < simulated / real < 2.0
        assert real > streams * 40  # tokens a second: each stream has some 200, far fewer where all wait for one
