"""diffusers: pipelines of random weights give the CPU's images."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torchvision_import  # noqa: F401

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")  # diffusers' and Transformers' own deprecations
BLOCKS = dict(layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4)


def unet():
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, attention_head_dim=4, **BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")).eval()


def image(pipeline, *args):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(*args, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images


def test_a_unet():
    want = image(diffusers.DDIMPipeline(unet(), diffusers.DDIMScheduler()))
    pipeline = diffusers.DDIMPipeline(unet(), diffusers.DDIMScheduler()).to("tpu")
    assert pipeline.device == torch.device("tpu", 0)
    np.testing.assert_allclose(image(pipeline), want, atol=1e-4)


def test_a_unet_offloaded_to_the_host():
    want = image(diffusers.DDIMPipeline(unet(), diffusers.DDIMScheduler()))
    pipeline = diffusers.DDIMPipeline(unet(), diffusers.DDIMScheduler())
    pipeline.enable_model_cpu_offload(device="tpu")
    np.testing.assert_allclose(image(pipeline), want, atol=1e-4)
    assert pipeline._execution_device.type == "tpu"


def test_a_diffusion_transformer():
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        out_channels=8, attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero", norm_elementwise_affine=False).eval()
    autoencoder = diffusers.AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4).eval()
    images = []
    for device in ("cpu", "tpu"):
        pipeline = diffusers.DiTPipeline(copy.deepcopy(transformer), copy.deepcopy(autoencoder),
                                         diffusers.DDIMScheduler()).to(device)
        images.append(image(pipeline, [1]))
    assert pipeline.device.type == "tpu" and pipeline.transformer.device.type == "tpu"
    np.testing.assert_allclose(images[1], images[0], atol=1e-3)


def test_a_training_step_of_the_noise():
    losses = []
    for device in ("cpu", "tpu"):
        model, scheduler = unet().train().to(device), diffusers.DDPMScheduler()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        clean, noise = (t.to(device) for t in torch.randn(2, 2, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
        when = torch.tensor([10, 500], device=device)
        for _ in range(2):
            loss = torch.nn.functional.mse_loss(model(scheduler.add_noise(clean, noise, when), when).sample, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-4) and losses[3] < losses[2]
