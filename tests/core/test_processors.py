"""How many threads should compute, from files by which Linux describes a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sakiyomi.core.processors import computing_threads, cpu_quota, fast_cores, physical_cores, usable_cpus
from system_files import machine_files, write

ALDER_LAKE = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]
"""Two fast cores of two hyperthreads each, and four efficient cores."""


def cpus(count: int) -> frozenset[int]:
    return frozenset(range(count))


def test_without_a_description_all_processors_compute(tmp_path: Path) -> None:
    assert computing_threads(cpus(6), tmp_path) == 6
    assert cpu_quota(tmp_path) is None
    assert computing_threads(usable_cpus()) >= 1


def test_hyperthreads_of_a_core_count_once(tmp_path: Path) -> None:
    machine_files(tmp_path, siblings=["0,2", "1,3", "0,2", "1,3"])
    assert physical_cores(cpus(4), tmp_path) == {0, 1}
    assert physical_cores(frozenset({2, 3}), tmp_path) == {2, 3}, "the first of those that the process may use"
    assert computing_threads(frozenset({0, 2}), tmp_path) == 1


@pytest.mark.parametrize("named", [True, False])
def test_efficient_cores_are_left_out(tmp_path: Path, named: bool) -> None:
    kinds = {"cpu_core": "0-3", "cpu_atom": "4-7"} if named else {}
    machine_files(tmp_path, siblings=ALDER_LAKE, kinds=kinds, capacities=[] if named else [1024] * 4 + [440] * 4)
    assert computing_threads(cpus(8), tmp_path) == 2
    assert computing_threads(frozenset({5, 6, 7}), tmp_path) == 3, "the process may use no others"


def test_cores_of_nearly_the_same_capacity_compute_together(tmp_path: Path) -> None:
    machine_files(tmp_path, capacities=[1024, 900, 900, 300])
    assert fast_cores(cpus(4), tmp_path) == {0, 1, 2}


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_the_quota_of_a_control_group_holds(tmp_path: Path, quota: str, threads: int) -> None:
    machine_files(tmp_path, quota=quota)
    assert computing_threads(cpus(8), tmp_path) == threads


def test_the_quota_of_version_1_holds(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/a\n3:cpuset:/b\n0::/")
    group = tmp_path / "sys/fs/cgroup/cpu/a"
    write(group / "cpu.cfs_period_us", "100000")
    write(group / "cpu.cfs_quota_us", "-1")
    assert cpu_quota(tmp_path) is None
    write(group / "cpu.cfs_quota_us", "300000")
    assert cpu_quota(tmp_path) == 3.0
