"""The helper that knows tokenizers: it never outlives the driver that asks it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

DRIVER = """
import os
from outrider.runner.job.tokenizer_process import TokenizerProcess
with TokenizerProcess() as tokenizer_process:
    print(tokenizer_process._ask(os.getpid), flush=True)
    input()
"""


@pytest.mark.slow
def test_the_helper_of_a_killed_driver_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        helper = psutil.Process(int(driver.stdout.readline()))
        assert helper.ppid() == driver.pid
        driver.kill()
        helper.wait(timeout=30)


BUSY = """
import time
from outrider.runner.job.tokenizer_process import TokenizerProcess
try:
    with TokenizerProcess() as tokenizer_process:
        asked = tokenizer_process._begin(time.sleep, 600)
        while not asked._future.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("left")
"""


@pytest.mark.slow
def test_whoever_gives_up_does_not_wait_for_what_the_helper_is_at() -> None:
    """It may read weights for minutes, and a request to end that the driver alone is told does not reach it."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("left\n", "")
