"""Adaptations of other libraries: one file each, applied when the library is imported, each behind a check that the
thing it adapts is still there. TORCH_TPU_INTEGRATIONS=off switches them off."""
