"""Functions over a mesh: jax.shard_map around the user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import signature


def over(fn: Callable[..., Any], of: signature.Signature, name: str, mesh: Any, inputs: Any,
         outputs: Any) -> Callable[..., Any]:
    """The function itself without a mesh, else its shard_map. Static arguments are not spread.

    Raises:
        ValueError: partition specs that do not fit the function or the mesh; a mesh of chips that this process does
            not drive.
    """
    if mesh is None:
        if inputs is not None or outputs is not None:
            raise ValueError(f"jax_op {name}: partition specs say how arrays lie on a mesh; give mesh= too")
        return fn
    import jax

    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(f"jax_op {name}: mesh is a {type(mesh).__name__}, not a jax.sharding.Mesh")
    if mesh.size != 1:
        raise ValueError(f"jax_op {name}: the mesh has {mesh.size} chips, and this process's programs run on one; in "
                         "a job of several processes each has its own part of the tensors, and torch.distributed's "
                         "collectives between operators move data (see docs/distributed.md)")
    spread = [p for p in of.parameters if p.kind != signature.STATIC]
    if any(p.kind != "tensor" for p in spread):
        raise ValueError(f"jax_op {name}: with a mesh every array parameter is a plain jax.Array, not Optional and not "
                         "a list")
    specs = _specs(inputs, len(spread), name, "input")
    results = _specs(outputs, of.results, name, "output")
    for spec in (*specs, *results):
        for axis in jax.tree.leaves(tuple(spec)):
            if axis not in mesh.axis_names:
                raise ValueError(f"jax_op {name}: a partition spec names the axis {axis!r}; the mesh has "
                                 f"{', '.join(map(str, mesh.axis_names))}")

    def mapped(*args: Any, **kwargs: Any) -> Any:
        arguments = of.arguments(args, kwargs)
        arrays, layout = of.split(arguments)

        def local(*parts: Any) -> Any:
            return of.call(fn, of.join(parts, layout))

        return jax.shard_map(local, mesh=mesh, in_specs=tuple(specs),
                             out_specs=results[0] if of.returns == "one" else tuple(results))(*arrays)

    return mapped


def _specs(given: Any, count: int, name: str, what: str) -> list[Any]:
    import jax

    if given is None:
        return [jax.sharding.PartitionSpec()] * count
    specs = [given] if isinstance(given, jax.sharding.PartitionSpec) else list(given)
    if len(specs) != count or not all(isinstance(each, jax.sharding.PartitionSpec) for each in specs):
        raise ValueError(f"jax_op {name}: {what}_partition_specs needs one jax.sharding.PartitionSpec for each of "
                         f"{count} {what} arrays, got {given!r}")
    return specs
