"""Transformers (tried on 5.24.0): `quantization_config=TpuQuantConfig("int8")` in `from_pretrained`, and checkpoints
saved so. Each weight becomes integers as soon as it is read, so the floats of a model are never there all at once.

Not private, but the loading code's inner interface: HfQuantizer's hooks, and ConversionOps.convert.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from .. import quantization
from . import on_import

METHOD = "tpu"


def install() -> None:
    on_import.after("transformers.quantizers.auto", _register)


def config_class() -> Any:
    """The configuration's class. Imports Transformers.

    Raises:
        ImportError: Transformers is not there, or TORCH_TPU_INTEGRATIONS=off.
    """
    from transformers.quantizers import auto

    found = auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(METHOD)
    if found is None:
        raise ImportError("TpuQuantConfig is not registered with Transformers: TORCH_TPU_INTEGRATIONS is off, or this "
                          "version was not adapted to (a warning said so when it was imported)")
    return found


def _register(module: ModuleType) -> None:
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class TpuQuantConfig(QuantizationConfigMixin):
        """Weights of eight or four bits, by torch_tpu.quantize; see there for the arguments."""

        def __init__(self, mode: str = "int8", group_size: int = 64, embeddings: bool = False,
                     skip: list[str] | tuple[str, ...] = (), quant_method: str = METHOD) -> None:
            quantization.check(mode, group_size)
            self.quant_method = quant_method  # type: ignore[assignment]
            self.mode, self.group_size, self.embeddings, self.skip = mode, group_size, embeddings, list(skip)

    class TpuQuantizer(HfQuantizer):
        """Loads weights as integers, or a checkpoint that holds them."""

        quantization_config: Any

        @property
        def quantized_element_size(self) -> float:
            return 0.5 if self.quantization_config.mode == "int4" else 1

        def _arguments(self) -> dict[str, Any]:
            config = self.quantization_config
            return {"group_size": config.group_size, "embeddings": config.embeddings, "skip": config.skip}

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            among = getattr(model.config, "distributed_config", None)
            shared = {f"{axis}_size={size}" for axis in ("tp", "fsdp", "pp", "ep")
                      if (size := getattr(among, f"{axis}_size", None) or 1) > 1}
            if shared:
                raise ValueError(f"TpuQuantConfig: a model that several processes share ({', '.join(sorted(shared))}) "
                                 "cannot be quantized; one process drives several chips with torch.tpu.mesh(tp=N) and "
                                 "device_map=\"tpu\", or leave the quantization_config out")
            if self.pre_quantized:  # the parameters that the checkpoint has
                for shares, of in model.all_tied_weights_keys.items():  # model.tie_weights does nothing before loading
                    layer, parameter = get_module_from_name(model, shares)
                    setattr(layer, parameter, model.get_parameter(of))
                quantization.quantize(model, self.quantization_config.mode, **self._arguments())
                return model
            config = self.quantization_config
            tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
            self._wanted = {f"{name}.weight": kind for name, kind in
                            quantization.plan(model, config.mode, **self._arguments()) if f"{name}.weight" not in tied}
            return model

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            return not self.pre_quantized and param_name in self._wanted

        def get_quantize_ops(self) -> Any:
            return Quantize(self)

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            if not self.pre_quantized:  # what shares its weight is there only now
                quantization.finish(model, self.quantization_config.mode, **self._arguments())
            return model

        def _dequantize(self, model: Any, dtype: Any = None) -> Any:
            return quantization.dequantize(model).to(dtype)

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

        @property
        def is_compileable(self) -> bool:
            return True

    class Quantize(ConversionOps):
        """One linear layer's weight."""

        def __init__(self, quantizer: Any) -> None:
            self.quantizer = quantizer

        def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            model, full_layer_name, missing_keys = (kwargs[key] for key in ("model", "full_layer_name", "missing_keys"))
            [value] = input_dict.values()
            value = value[0] if isinstance(value, list) else value
            layer, _ = get_module_from_name(model, full_layer_name)
            layer.weight = nn.Parameter(value, requires_grad=False)
            layer.__class__ = self.quantizer._wanted[full_layer_name]
            layer.quantize_(self.quantizer.quantization_config.group_size)
            for parameter in (layer.weight, layer.weight_scale):  # not to be initialised: they are loaded
                parameter._is_hf_initialized = True
            layer._is_hf_initialized = getattr(layer, "bias", None) is None
            if missing_keys is not None:
                missing_keys.discard(full_layer_name)
            return {}

    module.register_quantization_config(METHOD)(TpuQuantConfig)
    module.register_quantizer(METHOD)(TpuQuantizer)
