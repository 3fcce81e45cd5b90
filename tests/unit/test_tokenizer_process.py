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
