"""Every private door of PyTorch and JAX that torch_tpu goes through, opened once. When one moved, this says which."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import pytest
import torch

from processes import python

# The one for the reader: what was there when these doors were last tried.
TRIED = "torch 2.13.0, jax 0.10.2"

TORCH_NAMES = [
    "_C._from_dlpack", "_C.DispatchKeySet", "_C.DispatchKey.Meta", "_C.DispatchKey.AutocastPrivateUse1",
    "_C._ExcludeDispatchKeyGuard", "_C._acc.register_python_privateuseone_hook",
    "_C._acc.register_python_privateuseone_device_guard", "_C._get_privateuse1_backend_name",
    "_C._dispatch_has_kernel_for_dispatch_key", "_C._DisableTorchDispatch", "_C.StorageBase.__new__",
    "_C.TensorBase.data", "_C.Generator", "_C._get_accelerator",
    "utils.backend_registration._setup_privateuseone_for_python_backend", "_register_device_module",
    "UntypedStorage.copy_", "UntypedStorage.resize_", "UntypedStorage.fill_", "UntypedStorage._write_file",
    "UntypedStorage._set_from_file", "UntypedStorage._byteswap", "UntypedStorage._share_fd_cpu_",
    "UntypedStorage._share_filename_cpu_", "UntypedStorage.__getitem__", "UntypedStorage.__setitem__",
    "UntypedStorage.new", "accelerator.device_index", "accelerator.memory.memory_stats",
    "accelerator.memory.get_memory_info", "accelerator.memory.empty_cache", "accelerator.synchronize",
    "accelerator.current_stream", "accelerator.set_stream", "accelerator.set_device_index",
    "_tensor_str._tensor_str", "Tensor.__dlpack__", "Tensor.__dlpack_device__", "Tensor._use_count",
    "nn.Module._apply", "nn.RNNBase._init_flat_weights", "__future__.set_swap_module_params_on_conversion",
    "_C._current_autograd_node", "autograd._get_sequence_nr", "utils.swap_tensors", "library.fallthrough_kernel",
    "set_autocast_dtype",
]


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_has_it(name):
    thing = torch
    for part in name.split("."):
        assert hasattr(thing, part), f"torch.{name} is gone (last tried on {TRIED})"
        thing = getattr(thing, part)


def test_printing_takes_a_tensor_and_an_indent():
    theirs = inspect.unwrap(torch._tensor_str._tensor_str)
    assert list(inspect.signature(theirs).parameters) == ["self", "indent"]


def test_apply_takes_a_function_and_recurse():
    assert list(inspect.signature(inspect.unwrap(torch.nn.Module._apply)).parameters) == ["self", "fn", "recurse"]


def test_rng_hooks_have_their_names():
    assert "_is_in_bad_fork" in inspect.getsource(torch.random._seed_custom_device)
    assert "_initialized" in inspect.getsource(torch.utils.checkpoint)


def test_a_dlpack_capsule_becomes_a_device_tensor():
    from torch_tpu.tensor import torch_door

    one = torch_door.new_tensor((2, 3), (3, 1), torch.float32)
    two = torch_door.new_tensor((2, 3), (3, 1), torch.float32)
    assert type(one) is torch.Tensor and one.device == torch.device("tpu", 0) and one.stride() == (3, 1)
    assert one.data_ptr() != two.data_ptr() and one.untyped_storage().nbytes() == 24


def test_storages_keep_their_python_object():
    from torch_tpu.tensor import torch_door

    tensor = torch_door.new_tensor((4,), (1,), torch.float32)
    tensor.untyped_storage()._mark = 5
    view = torch_door.as_strided(tensor, (2,), (1,), 1)
    assert view.untyped_storage()._mark == 5 and view.data_ptr() == tensor.data_ptr() + 4


def test_views_and_rebinding():
    from torch_tpu.tensor import torch_door

    leaf = torch.ones(4, device="tpu", requires_grad=True)
    view = leaf.view(2, 2)
    assert view._base is leaf
    viewed = torch_door.redispatch_view(torch.ops.aten.view.default, leaf.detach(), (2, 2))
    assert viewed.shape == (2, 2)
    other = torch.zeros(6, device="tpu")
    bound = torch.empty(0, device="tpu")
    torch_door.set_storage(bound, other.untyped_storage(), 2, (3,), (1,))
    assert bound.data_ptr() == other.data_ptr() + 8


def test_swapped_tensors_keep_their_identity():
    one, two = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(2, device="tpu"))
    torch.utils.swap_tensors(one, two)
    assert one.is_tpu and one.shape == (2,)


@pytest.fixture(scope="module")
def chip():
    from torch_tpu.runtime import client

    return client.get().device


def test_x64_is_scoped_to_the_block_and_the_thread():
    import jax

    from torch_tpu.runtime import jax_door

    seen = []
    with jax_door.x64():
        assert jax.numpy.arange(2).dtype == np.int64
        thread = threading.Thread(target=lambda: seen.append(jax.numpy.arange(2).dtype))
        thread.start()
        thread.join()
    assert seen == [np.int32] and jax.numpy.arange(2).dtype == np.int32


@pytest.mark.parametrize("kind", [np.int64, np.float64, np.float32, np.bool_])
def test_put_keeps_the_dtype(chip, kind):
    from torch_tpu.runtime import jax_door

    array = jax_door.put(np.array([0, 1], kind), chip)
    assert array.dtype == kind and array.devices() == {chip} and array.tolist() == [0, 1]


def test_dlpack_shares_aligned_memory(chip):
    from torch_tpu.runtime import jax_door

    host = torch.arange(1024, dtype=torch.int64)
    array = jax_door.import_dlpack(torch.utils.dlpack.to_dlpack(host), chip)
    assert array.dtype == np.int64 and array.unsafe_buffer_pointer() == host.data_ptr()
    assert torch.utils.dlpack.from_dlpack(jax_door.export_dlpack(array)).data_ptr() == host.data_ptr()


def test_trace_compile_save_load_execute(chip):
    import jax

    from torch_tpu.runtime import jax_door

    traced = jax_door.trace(lambda a, b: [a + b, a * 2], [jax.ShapeDtypeStruct((2,), np.float64)] * 2)
    module, infos = jax_door.lower(traced), jax_door.results(traced)
    assert jax_door.module_bytes(module) == jax_door.module_bytes(module) and b"f64" in jax_door.module_bytes(module)
    options = jax_door.compile_options(chip)
    program = jax_door.compile_module(module, chip, options)
    argument = jax_door.put(np.array([1.0, 2.0]), chip)
    again = jax_door.load_executable(jax_door.save_executable(program), chip, options)
    for runs in (program, again):
        results = jax_door.execute(runs, [argument, argument], jax_door.outputs(infos, chip))
        assert [out.tolist() for out in results] == [[2.0, 4.0], [2.0, 4.0]]
    assert program.get_hlo_text() and program.get_compiled_memory_stats() is not None


def test_compile_options_take_xla_flags(chip):
    from torch_tpu.runtime import jax_door

    assert jax_door.compile_options(chip, {"xla_cpu_enable_fast_math": False}) is not None


def test_client_names_its_version(chip):
    from torch_tpu.runtime import jax_door

    assert jax_door.client_version(chip).startswith("cpu")


def test_errors_of_xla_have_a_type(chip):
    from torch_tpu.runtime import jax_door

    with pytest.raises(jax_door.XlaError):
        jax_door.load_executable(b"nonsense", chip, jax_door.compile_options(chip))


def test_the_fork_warning_has_its_switch():
    from jax._src import xla_bridge

    assert isinstance(xla_bridge._at_fork_handler_installed, bool)
    assert "_at_fork_handler_installed" in inspect.getsource(xla_bridge.backends)


def test_live_arrays_can_be_waited_for(chip):
    array = torch.ones(3, device="tpu")
    assert array is not None and all(a.is_ready() is not None for a in chip.client.live_arrays() if not a.is_deleted())


def test_stance():
    """torch.compiler's stance, which captures follow (compile/compile_doors.py)."""
    from torch._dynamo import eval_frame

    from torch_tpu.compile import compile_doors

    assert eval_frame._stance.stance == "default" and isinstance(eval_frame.config.disable, bool)
    assert compile_doors.compiles()
    with torch.compiler.set_stance("force_eager"):
        assert not compile_doors.compiles()


def test_pallas_kernels_are_interpreted_in_our_programs_only():
    """Lowering rules that stand before JAX's own (runtime/pallas_door.py)."""
    import jax
    from jax._src.pallas import pallas_call as theirs
    from jax.experimental import pallas as pl

    from torch_tpu.runtime import jax_door, pallas_door

    pallas_door.install()
    source = inspect.getsource(theirs._pallas_call_lowering)
    assert "if interpret:" in source and "Only interpret mode is supported on CPU" in source

    def twice(ref, out):
        out[...] = ref[...] * 2

    def call(x):
        return [pl.pallas_call(twice, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)]

    shape = jax.ShapeDtypeStruct((8, 128), np.float32)
    assert b"custom_call" not in jax_door.module_bytes(jax_door.lower(jax_door.trace(call, [shape])))
    assert b"tpu_custom_call" in jax_door.module_bytes(jax_door.lower(jax_door.trace(call, [shape]), "tpu"))
    with pytest.raises(ValueError, match="interpret mode"):
        jax.jit(call).lower(shape)


def test_serialised_modules_are_read():
    import jax

    from torch_tpu.runtime import jax_door

    exported = jax.export.export(jax.jit(lambda a, b: a + b))(*[jax.ShapeDtypeStruct((2,), np.float32)] * 2)
    module = jax_door.parse_module(exported.mlir_module_serialized)
    assert jax_door.module_arguments(module) == 2 and b"stablehlo.add" in jax_door.module_bytes(module)


def test_autograd_functions_below_transforms():
    """custom/autograd.py: Function.apply at autograd's place in the dispatcher, under torch.func."""
    from torch._functorch.autograd_function import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        assert hasattr(super(torch.autograd.Function, torch.autograd.Function), "apply")


def test_a_client_of_several_virtual_chips_is_silent():
    finished = python("""
        import torch
        torch.ones(2, device="tpu")
        import jax
        print(len(jax.local_devices(backend="cpu")))
    """, TORCH_TPU_VIRTUAL_CHIPS="3")
    assert finished.stdout.strip() == "3" and finished.stderr == "", finished.stderr


def test_programs_over_a_mesh():
    finished = python("""
        import torch, jax, jax.numpy as jnp, numpy as np
        torch.ones(2, device="tpu")
        from torch_tpu.runtime import jax_door
        chips = jax.local_devices(backend="cpu")
        grid = jax_door.mesh(chips, {"a": 2, "b": 2})
        rows, whole = jax_door.named_sharding(grid, ("a",)), jax_door.named_sharding(grid, ())
        assert jax_door.on_mesh(rows, grid) and not jax_door.on_mesh(jax.sharding.SingleDeviceSharding(chips[0]), grid)
        value = np.arange(8, dtype=np.int64).reshape(4, 2)
        array = jax_door.put_parts(value, rows)
        assert array.dtype == np.int64 and array.sharding is rows and (np.asarray(array) == value).all()
        assert jax_door.spread(array, whole).sharding == whole
        traced = jax_door.trace(lambda x: [x @ x.T, x + 1], [jax.ShapeDtypeStruct((4, 2), np.int64)])
        def program(x):
            values = dict(zip(traced.jaxpr.jaxpr.invars, [x]))
            for equation in traced.jaxpr.eqns:
                given = [a.val if jax_door.is_literal(a) else values[a] for a in equation.invars]
                values.update(zip(equation.outvars, jax_door.bind(equation, given)))
            return [jax_door.constrain(values[v], whole) if i == 0 else values[v]
                    for i, v in enumerate(traced.jaxpr.jaxpr.outvars)]
        module = jax_door.lower_over(program, [jax.ShapeDtypeStruct((4, 2), np.int64)], [rows], [None, rows], [])
        options = jax_door.partition_options(chips, [True, False])
        made = jax_door.compile_module(module, chips[0], options, chips)
        again = jax_door.load_executable(jax_door.save_executable(made), chips[0], options, chips)
        for loaded in (made, again):
            assert jax_door.output_specs(loaded, grid, [2, 2]) == [(), ("a",)]
            makers = jax_door.outputs_over(jax_door.results(traced), [whole, rows])
            product, added = jax_door.execute(loaded, [array], makers)
            assert (np.asarray(product) == value @ value.T).all() and (np.asarray(added) == value + 1).all()
    """, TORCH_TPU_VIRTUAL_CHIPS="4")
    assert finished.returncode == 0, finished.stderr
