"""Every adaptation, in one place; called once when the device is registered."""

from __future__ import annotations

from ..runtime import config


def install() -> None:
    """Registers the adaptations. Imports none of the libraries."""
    from ..distributed import backend
    from . import (
        torch_collectives,
        torch_compile,
        torch_context_parallel,
        torch_ddp,
        torch_dtensor,
        torch_dynamo,
        torch_flex_attention,
        torch_modules,
        torch_tensor,
    )

    torch_collectives.install()
    torch_compile.install()
    torch_context_parallel.install()
    torch_ddp.install()
    torch_dtensor.install()
    torch_dynamo.install()
    torch_flex_attention.install()
    torch_modules.install()
    torch_tensor.install()
    backend.install()
    try:
        if not config.INTEGRATIONS.flag():
            return
    except config.SettingError:  # said by the first use of the device
        pass
    from . import (
        accelerate,
        accelerate_memory,
        accelerate_random,
        kernels,
        lightning,
        safetensors,
        transformers,
        transformers_cache,
        transformers_flex,
        transformers_generate,
        transformers_mesh,
        transformers_quantization,
        transformers_tp,
        transformers_trainer,
    )

    accelerate.install()
    accelerate_memory.install()
    accelerate_random.install()
    kernels.install()
    lightning.install()
    safetensors.install()
    transformers.install()
    transformers_cache.install()
    transformers_flex.install()
    transformers_generate.install()
    transformers_mesh.install()
    transformers_quantization.install()
    transformers_tp.install()
    transformers_trainer.install()
