"""`torch-tpu conformance`: PyTorch's own operator tests on the device, against the CPU.

Read in this order: `database` (what is tested), `compare` (when results are equal), `check` (one operator and dtype),
`worker` (the subprocess), `pool` (the parent), `report` (the page).
"""
