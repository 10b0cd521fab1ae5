"""Several chips of one process as one device: torch.tpu.mesh."""

from .mesh import Mesh, mesh
from .plan import Layout, layouts

__all__ = ["Layout", "Mesh", "layouts", "mesh"]
