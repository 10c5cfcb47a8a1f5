"""The environment of the tests: the same for everybody, whatever they have set, and whatever lies in their home folder.

Neither time zone nor locale is set: code must not depend on them.
"""

from __future__ import annotations

import atexit
import os
import random
import secrets
import shutil
import site
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from processes import own_environment
from sakiyomi.core.files import cache_folder
from sakiyomi.kernels import variants

__all__ = ["build_kernels", "fix_examples", "neutralise", "same_draws"]

_SUITE = ("CHROMIUM", "DAMAGES", "KILLS", "NATIVE", "REAL", "SCREENSHOTS", "TEST_ENGINES")
"""What somebody chooses for the suite itself, behind ``SAKIYOMI_``."""
_PREFIXES = (
    "SAKIYOMI_", "ACCELERATE_", "ANTHROPIC_", "GIT_", "GOMP_", "HF_", "HUGGINGFACE_", "KMP_", "MKL_", "OMP_", "OPENAI_",
    "OPENBLAS_", "PYTORCH_", "RAY_", "TORCH", "TRANSFORMERS_", "XDG_",
)  # fmt: skip
_NAMES = {
    "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS",
    "PYTHONDEVMODE", "PYTHONOPTIMIZE", "PYTHONUTF8", "PYTHONWARNINGS", "TERMINAL_WIDTH", "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE",
    "ALL_PROXY", "FTP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
}  # fmt: skip
_KEPT = ("kernels", "hypothesis", "matplotlib", "triton")
"""Folders of what takes long to make, named by what it is made of: runs share them."""


@cache
def neutralise() -> None:
    """Remove variables that change what code does, and give the run a home folder of its own; once.

    Called before anything is imported that reads them. Other processes that run tests inherit the result.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    builds, packages = cache_folder().absolute(), site.getuserbase()
    suite = {f"SAKIYOMI_{name}" for name in _SUITE}
    for name in set(os.environ) - suite:
        if name.startswith(_PREFIXES) or name.upper() in _NAMES:
            del os.environ[name]
    home = Path(tempfile.mkdtemp(prefix="sakiyomi-home-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    caches = home / ".cache" / "sakiyomi"
    caches.mkdir(parents=True)
    for name in _KEPT:
        with suppress(OSError):  # where that cannot be written, this run makes its own
            (builds / name).mkdir(parents=True, exist_ok=True)
            (caches / name).symlink_to(builds / name, target_is_directory=True)
    os.environ |= {
        "HOME": str(home),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(caches / "hypothesis"),
        "MPLCONFIGDIR": str(caches / "matplotlib"),
        "OMP_NUM_THREADS": "1",  # models are tiny: a second thread gains nothing, and on a busy machine two wait
        "PYTHONIOENCODING": "utf-8",  # of what programs say to the tests
        "PYTHONUSERBASE": packages,
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }


def build_kernels() -> None:
    """Compile the kernels where no run has: once, and not within the time of the first test that needs them."""
    name = variants.fitting()
    if name is not None and not any((cache_folder() / "kernels").glob(f"{variants.stem(name)}-*.so")):
        code = "from sakiyomi.kernels.build import native; native()"
        subprocess.run([sys.executable, "-c", code], env=own_environment(), check=False)


def fix_examples() -> None:
    """Have hypothesis try the same examples everywhere, without a deadline, for machines that are busy.

    ``--hypothesis-profile=search`` looks for new counterexamples.
    """
    from hypothesis import settings  # which reads the environment

    settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=100, database=None)
    settings.register_profile("search", deadline=None, max_examples=2000)
    settings.load_profile("fixed")


_chance = random.Random()


def same_draws() -> None:
    """Start what is drawn without a seed again: for each test, so that no result is one run's luck or of its order.

    ``UNSTEADY=SEED`` gives other draws.
    """
    seed = os.environ.get("UNSTEADY", "")
    secrets.randbits = _chance.getrandbits  # of which requests without a seed make theirs
    _chance.seed(seed)
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(_chance.getrandbits(31))
