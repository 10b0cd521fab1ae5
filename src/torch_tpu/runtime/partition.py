"""Several chips of one process as one: programs over arrays that are spread over a mesh of chips, partitioned by XLA.

An array carries how it is spread (its sharding); a program is compiled for each way its arguments are. Everything
above this layer sees arrays of the full shape, and one chip.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from . import client, jax_door, stored

Spec = tuple[Any, ...]  # per dimension of an array: None, the name of an axis of the mesh, or a tuple of names


class Mesh:
    """Chips in a grid with named axes.

    Attributes:
        axes: the name and size of each axis, outermost first.
        chips: the devices, in order.
        batch_axes: those that divide the batch.
        here: False for chips that this process does not have: programs are only compiled for them.
        replicated: the sharding of an array that every chip holds whole.
        launched: how many programs were handed to the chips, where they are virtual ones.
    """

    def __init__(self, axes: dict[str, int], batch_axes: Sequence[str] = (), here: bool = True) -> None:
        self.axes = dict(axes)
        self.batch_axes = tuple(name for name in batch_axes if axes[name] > 1)
        count = math.prod(axes.values())
        self.chips = tuple(client.get().devices[:count]) if here else ()
        self.grid = jax_door.mesh(self.chips, self.axes) if here else jax_door.abstract_mesh(self.axes)
        self._shardings: dict[Spec, Any] = {}
        self._stored: dict[Spec, Any] = {}
        self.launched = 0
        self.replicated = self.sharding(())

    def sharding(self, spec: Spec) -> Any:
        """The sharding for a spec: always the same object, so that comparing two is soon done."""
        while spec and spec[-1] is None:
            spec = spec[:-1]
        found = self._shardings.get(spec)
        if found is None:
            found = self._shardings[spec] = jax_door.named_sharding(self.grid, spec)
        return found

    def stored(self, spec: Spec) -> Any:
        """The sharding of a weight that is stored in parts and used whole (runtime/stored.py), where the spec has a
        batch axis: it equals `sharding(spec)`, and is known by its identity."""
        if not any(self._of_batch(part) for part in spec):
            return self.sharding(spec)
        found = self._stored.get(spec)
        if found is None:
            found = self._stored[spec] = jax_door.named_sharding(self.grid, spec)
        return found

    def used(self, sharding: Any) -> Any | None:
        """How a stored weight is spread where it is used; None for any other array."""
        for spec, known in self._stored.items():
            if known is sharding:
                return self.sharding(tuple(None if self._of_batch(part) else part for part in spec))
        return None

    def _of_batch(self, names: Any) -> bool:
        return not set((names,) if isinstance(names, str) else names or ()).isdisjoint(self.batch_axes)

    def parts(self, names: Any) -> int:
        """Into how many parts a dimension is divided that lies along these axes."""
        if names is None:
            return 1
        return math.prod(self.axes[name] for name in ((names,) if isinstance(names, str) else names))

    def has(self, sharding: Any) -> bool:
        """Whether a sharding is over these chips."""
        return jax_door.on_mesh(sharding, self.grid)

    def spread(self, array: Any, sharding: Any) -> Any:
        """The array's values, spread so."""
        return array if array.sharding is sharding else jax_door.spread(array, sharding)

    def put(self, value: np.ndarray, sharding: Any) -> Any:
        """A NumPy array on the chips: each gets only its own part."""
        return jax_door.put_parts(value, sharding)


current: Mesh | None = None
epoch = 0  # how many meshes there were: programs of before are for one chip


def activate(mesh: Mesh) -> None:
    global current, epoch
    current = mesh
    epoch += 1


def chip_bytes(array: Any, nbytes: int) -> int:
    """Of an array's bytes, those that one chip holds."""
    sharding = getattr(array, "sharding", None)
    if sharding is None or not array.size:
        return nbytes
    return nbytes // array.size * math.prod(sharding.shard_shape(array.shape))


def spec_of(array: Any, mesh: Mesh) -> Spec | None:
    """How an array is spread, for each dimension; None where it is not on the mesh."""
    sharding = array.sharding
    if not jax_door.on_mesh(sharding, mesh.grid):
        return None
    spec = tuple(sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


class Variant:
    """A program for one way in which its arguments are spread."""

    __slots__ = ("loaded", "makers", "moved")

    def __init__(self, loaded: Any, makers: list[Any], moved: list[tuple[int, Any]]) -> None:
        self.loaded, self.makers = loaded, makers
        self.moved = moved  # arguments that come from elsewhere, and the sharding they get


def lower(mesh: Mesh, jaxpr: Any, avals: Sequence[Any], given: Sequence[Any], wanted: Sequence[Any],
          donate: Sequence[int], platform: str | None = None) -> Any:
    """StableHLO of a traced function whose arguments are spread as `given`, and its results as `wanted` (None: as XLA
    likes), for JAX's own platform or the one that is named."""
    whole = {position: used for position, sharding in enumerate(given) if (used := mesh.used(sharding)) is not None}

    def program(*arrays: Any) -> list[Any]:
        return stored.replay(jaxpr, arrays, whole) if whole else jax_door.replay(jaxpr, arrays)

    return jax_door.lower_over(program, avals, given, wanted, donate, platform)


_sharding_of = operator.attrgetter("sharding")

# XLA:CPU (jaxlib 0.10.2) lets 32 programs wait for each chip. The thread that hands over one more waits for a place,
# and is one of as many threads as there are chips: a collective then misses the chip that has no thread left, for ever.
_VIRTUAL_CHIPS_IN_FLIGHT = 16


class Program:
    """Runs a traced function on the mesh.

    Args:
        jaxpr: what it computes.
        avals: shape and dtype of each argument.
        results: of each result.
        donate: arguments whose memory the results may take over.
        pins: (result, argument): the result is written where the argument was, and stays spread as that was.
        obtain: compiles a module, or loads it: takes the module, XLA's options and the chips.
        options: XLA options of this program.
    """

    def __init__(self, jaxpr: Any, avals: Sequence[Any], results: Sequence[Any], donate: Sequence[int],
                 pins: Iterable[tuple[int, int]] | None, obtain: Callable[..., Any],
                 options: dict[str, Any] | None) -> None:
        assert current is not None
        self.mesh = current
        self.jaxpr, self.avals, self.results, self.donate = jaxpr, avals, results, tuple(donate)
        self.pins = dict(_by_kind(avals, results, donate) if pins is None else pins)
        self.obtain, self.options = obtain, options
        self.variants: dict[tuple[Any, ...], Variant] = {}
        self.usual: list[Any] = []
        self.last: Variant | None = None
        self.virtual = bool(self.mesh.chips) and self.mesh.chips[0].platform == "cpu"

    def __call__(self, arrays: list[Any]) -> list[Any]:
        spread = list(map(_sharding_of, arrays))
        variant = self.last
        if variant is None or not all(map(operator.is_, spread, self.usual)):
            key = (*spread, *(self.mesh.used(sharding) for sharding in spread))
            variant = self.variants.get(key)
            if variant is None:
                variant = self.variants[key] = self._make(spread)
            self.usual, self.last = spread, variant
        if variant.moved:
            arrays = list(arrays)
            for position, sharding in variant.moved:
                arrays[position] = jax_door.spread(arrays[position], sharding)
        results = jax_door.execute(variant.loaded, arrays, variant.makers)
        if self.virtual and results:
            self.mesh.launched += 1
            if self.mesh.launched % _VIRTUAL_CHIPS_IN_FLIGHT == 0:
                results[-1].block_until_ready()
        return results

    def _make(self, spread: list[Any]) -> Variant:
        mesh = self.mesh
        moved = []
        given = []
        for position, sharding in enumerate(spread):
            if jax_door.on_mesh(sharding, mesh.grid):
                given.append(sharding)
            else:
                given.append(mesh.replicated)
                moved.append((position, mesh.replicated))
        wanted = [given[self.pins[number]] if number in self.pins else None for number in range(len(self.results))]
        loaded = self._compile(given, wanted)
        made = jax_door.output_specs(loaded, mesh.grid, [len(result.shape) for result in self.results])
        if None in made:  # spread in a way that has no name here: those results are put together again
            wanted = [mesh.replicated if spec is None else w for spec, w in zip(made, wanted)]
            loaded = self._compile(given, wanted)
            made = jax_door.output_specs(loaded, mesh.grid, [len(result.shape) for result in self.results])
        shardings = [w if w is not None else mesh.sharding(spec or ()) for w, spec in zip(wanted, made)]
        return Variant(loaded, jax_door.outputs_over(self.results, shardings), moved)

    def _compile(self, given: list[Any], wanted: list[Any]) -> Any:
        module = lower(self.mesh, self.jaxpr, self.avals, given, wanted, self.donate)
        xla = jax_door.partition_options(self.mesh.chips, [w is None for w in wanted], self.options)
        return self.obtain(module, xla, self.mesh.chips)

    def ran(self) -> Any:
        """The executable that ran last.

        Raises:
            RuntimeError: none did.
        """
        if self.last is None:
            raise RuntimeError("the program has not run yet, and on several chips it is compiled at its first call")
        return self.last.loaded


def _by_kind(avals: Sequence[Any], results: Sequence[Any], donate: Sequence[int]) -> list[tuple[int, int]]:
    """For each donated argument the first result of its shape and dtype that is still free."""
    free = list(range(len(results)))
    pins = []
    for position in donate:
        for number in free:
            if results[number].shape == avals[position].shape and results[number].dtype == avals[position].dtype:
                pins.append((number, position))
                free.remove(number)
                break
    return pins
