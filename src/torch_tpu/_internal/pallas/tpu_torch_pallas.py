"""What the code that PyTorch's Inductor generates for the device imports and calls (torch 2.13)."""

from ...custom.modules import call_custom_kernel, lookup_custom_kernel, register_custom_kernel

__all__ = ["call_custom_kernel", "lookup_custom_kernel", "register_custom_kernel"]
