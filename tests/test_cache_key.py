"""Whatever changes the code that XLA makes is in the key of the disk cache, and what does not is shared."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
import torch

from processes import python
from torch_tpu.runtime import cache_key, client, jax_door

PRINT_KEY = """
    import os, sys
    import jax, numpy as np, torch
    torch.tpu.init()
    from torch_tpu.runtime import cache_key, client, jax_door
    traced = jax_door.trace(lambda a, b: [jax.numpy.exp(a @ b)], [jax.ShapeDtypeStruct((8, 8), np.float32)] * 2)
    module = jax_door.module_bytes(jax_door.lower(traced))
    print("KEY", cache_key.key(module, client.get().device, None, ()))
"""


def key_of_a_process(before: str = "", **environment: str) -> str:
    done = python(before + PRINT_KEY, **environment)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("KEY "))


@pytest.fixture(scope="module")
def plain():
    return key_of_a_process()


ONE_CORE = """
    import os
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
"""


@pytest.mark.parametrize("before, environment", [
    pytest.param("", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, id="XLA_FLAGS"),
    pytest.param("", {"LIBTPU_INIT_ARGS": "--xla_tpu_something=1"}, id="LIBTPU_INIT_ARGS"),
    pytest.param("", {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}, id="JAX_DISABLE_MOST_OPTIMIZATIONS"),
    pytest.param("", {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, id="matmul precision"),
    pytest.param(ONE_CORE, {}, id="cores", marks=pytest.mark.skipif(
        not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")),
])
def test_a_setting_of_the_process_is_in_the_key(plain, before, environment):
    assert key_of_a_process(before, **environment) != plain


def test_processes_agree(plain):
    """Also where the hash seed, the user's 64-bit setting and debug mode differ: they change no program."""
    assert key_of_a_process(PYTHONHASHSEED="7", JAX_ENABLE_X64="1", TORCH_TPU_DEBUG="1") == plain


def test_flags_in_a_file(tmp_path, plain):
    flags = tmp_path / "flags"
    flags.write_text("--xla_cpu_enable_fast_math=true\n")
    assert key_of_a_process(XLA_FLAGS=str(flags)) != plain


@pytest.fixture
def chip():
    torch.tpu.init()
    return client.get().device


def key(chip, options=None, replicas=(), shape=(8, 8), dtype=np.float32, donate=(), fn=lambda a, b: [a @ b]):
    traced = jax_door.trace(fn, [jax.ShapeDtypeStruct(shape, dtype)] * 2, donate)
    return cache_key.key(jax_door.module_bytes(jax_door.lower(traced)), chip, options, replicas)


def test_the_program_is_in_the_key(chip):
    keys = [key(chip), key(chip, shape=(4, 4)), key(chip, dtype=np.float64), key(chip, dtype=np.int32),
            key(chip, donate=(0,)), key(chip, fn=lambda a, b: [b @ a]), key(chip, fn=lambda a, b: [a @ b + 1]),
            key(chip, fn=lambda a, b: [a @ b + 2])]
    assert len(set(keys)) == len(keys)
    assert key(chip) == keys[0] and len(keys[0]) == 64


def test_xla_options_are_in_the_key(chip):
    keys = [key(chip), key(chip, {"xla_cpu_enable_fast_math": True}), key(chip, {"xla_cpu_enable_fast_math": False}),
            key(chip, {"exec_time_optimization_effort": 0.5})]
    assert len(set(keys)) == len(keys)
    one = {"xla_cpu_enable_fast_math": True, "xla_cpu_enable_fast_min_max": True}
    assert key(chip, one) == key(chip, dict(reversed(one.items())))


class Chip:
    """Another chip of the job; only its number and client matter."""

    def __init__(self, chip, number):
        self.id, self.client, self.device_kind = number, chip.client, chip.device_kind


def test_the_chips_of_a_collective_are_in_the_key(chip):
    first, second, third = (Chip(chip, number) for number in range(3))
    keys = [key(chip), key(first, replicas=[first, second]), key(second, replicas=[first, second]),
            key(first, replicas=[first, third]), key(first, replicas=[second, first]),
            key(first, replicas=[first, second, third])]
    assert len(set(keys)) == len(keys)


def test_a_program_of_one_chip_is_the_same_on_every_chip(chip):
    assert key(Chip(chip, 3)) == key(chip)


@pytest.mark.parametrize("name, value", [
    ("jax_default_matmul_precision", "highest"), ("jax_exec_time_optimization_effort", 0.5),
    ("jax_memory_fitting_effort", 0.5), ("jax_threefry_partitionable", None), ("jax_optimization_level", "O1"),
])
def test_jax_configuration_is_in_the_key(chip, name, value):
    def program(a, b):
        return [a @ b + jax.random.uniform(jax.random.key(0, impl="threefry2x32"), a.shape)]

    before = getattr(jax.config, name)
    plain = key(chip, fn=program)
    try:
        jax.config.update(name, not before if value is None else value)
        jax.clear_caches()
        assert key(chip, fn=program) != plain
    finally:
        jax.config.update(name, before)
        jax.clear_caches()
    assert key(chip, fn=program) == plain


@pytest.mark.parametrize("name", ["jax", "jaxlib", "client", "device", "machine", "cpu", "cores"])
def test_versions_chip_and_cpu_are_in_the_key(chip, name, monkeypatch):
    here, plain = cache_key.environment(), key(chip)
    assert here[name]
    monkeypatch.setattr(cache_key, "environment", lambda: {**here, name: "another"})
    assert key(chip) != plain


def test_a_cpu_is_its_model_and_its_instruction_sets(tmp_path):
    def cpu(text):
        (tmp_path / "cpuinfo").write_text(text)
        return cache_key._cpu(tmp_path / "cpuinfo")

    intel = "processor\t: 0\nmodel name\t: Xeon\ncpu MHz\t\t: {}\nflags\t\t: sse avx {}\n\nprocessor\t: 1\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n\n"
    seen = [cpu(intel.format(2000, "")), cpu(intel.format(2000, "avx512f")), cpu(arm.format("", "0xd0c")),
            cpu(arm.format("sve", "0xd0c")), cpu(arm.format("", "0xd4f"))]
    assert len(set(seen)) == len(seen) and seen[0].startswith("Xeon (")
    assert cpu(intel.format(3100, "")) == seen[0]  # the clock rate of the moment is none of it
