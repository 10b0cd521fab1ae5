"""Pipelines of images, and of tables and documents, that were given no device: on the chip, with the CPU's results."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torchvision_import  # noqa: F401
import transformers
from pipeline_pair import compare
from vocabulary import SIZE, tokenizer

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")
pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own deprecations

PICTURE = Image.fromarray(np.random.RandomState(0).randint(0, 255, (32, 32, 3)).astype("uint8"))
SQUARE = {"height": 32, "width": 32}
VISION = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=32,
              patch_size=8)
TEXT = dict(vocab_size=SIZE, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=64)
T = transformers


def seeded(kind, config):
    torch.manual_seed(0)
    return getattr(T, kind)(config)


def test_classification_and_features():
    processor = T.ViTImageProcessor(size=SQUARE)
    compare("image-classification", seeded("ViTForImageClassification", T.ViTConfig(**VISION, num_labels=3)),
            lambda p: p([PICTURE, PICTURE], top_k=3), image_processor=processor)
    compare("image-feature-extraction", seeded("ViTModel", T.ViTConfig(**VISION)), lambda p: p(PICTURE),
            image_processor=processor)


def test_object_detection():
    config = T.YolosConfig(**{**VISION, "image_size": [32, 32]}, num_detection_tokens=5, num_labels=3)
    compare("object-detection", seeded("YolosForObjectDetection", config), lambda p: p(PICTURE, threshold=0.0),
            image_processor=T.YolosImageProcessor(size=SQUARE))


def test_segmentation():
    config = T.SegformerConfig(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
                               patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                               decoder_hidden_size=16, num_labels=3)
    compare("image-segmentation", seeded("SegformerForSemanticSegmentation", config), lambda p: p(PICTURE),
            image_processor=T.SegformerImageProcessor(size=SQUARE))


def test_depth():
    config = T.DPTConfig(**{**VISION, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], backbone_config=None,
                         neck_hidden_sizes=[8] * 4, fusion_hidden_size=8, is_hybrid=False)
    compare("depth-estimation", seeded("DPTForDepthEstimation", config), lambda p: p(PICTURE)["predicted_depth"],
            image_processor=T.DPTImageProcessor(size=SQUARE))


def test_zero_shot():
    text = dict(**TEXT, eos_token_id=2, bos_token_id=1, pad_token_id=0)
    model = seeded("CLIPModel", T.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8))
    compare("zero-shot-image-classification", model,
            lambda p: p(PICTURE, candidate_labels=["w11", "w12"], hypothesis_template="w13 {}"), tokenizer=tokenizer(),
            image_processor=T.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32))
    text["max_position_embeddings"] = 16
    config = T.OwlViTConfig(text_config=text, vision_config=VISION, projection_dim=16)
    model = seeded("OwlViTForObjectDetection", config)
    compare("zero-shot-object-detection", model,
            lambda p: p(PICTURE, candidate_labels=["w11", "w12"], threshold=0.0), tokenizer=tokenizer(),
            image_processor=T.OwlViTImageProcessor(size=SQUARE, crop_size=SQUARE))


@pytest.mark.parametrize("task", ["image-text-to-text", "any-to-any"])
def test_a_picture_in_a_text(task):
    config = T.LlavaConfig(
        text_config=T.LlamaConfig(vocab_size=128, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                  num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=None),
        vision_config=T.CLIPVisionConfig(**VISION), image_token_index=SIZE, vision_feature_layer=-1)
    processor = T.LlavaProcessor(
        image_processor=T.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32),
        tokenizer=tokenizer("<image>"), patch_size=8, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1)
    settings = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    model = seeded("LlavaForConditionalGeneration", config)
    compare(task, model, lambda p: p(images=PICTURE, text="<image> w15 w9", generate_kwargs=copy.copy(settings)),
            processor=processor)


def test_questions_about_a_document():
    config = T.LayoutLMConfig(**TEXT, max_2d_position_embeddings=1024)
    boxes = [(word, [10 * n, 10, 10 * n + 8, 20]) for n, word in enumerate(("w11", "w12", "w13"))]
    compare("document-question-answering", seeded("LayoutLMForQuestionAnswering", config),
            lambda p: p(image=None, question="w15 w16", word_boxes=boxes), tokenizer=tokenizer(pairs=True))


def test_questions_about_a_table(tmp_path):
    pytest.importorskip("pandas")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EMPTY]", *(f"w{number}" for number in range(6, SIZE))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    config = T.TapasConfig(**TEXT, num_aggregation_labels=4)
    table = {"w21": ["w31", "w32"], "w22": ["w33", "w34"]}
    compare("table-question-answering", seeded("TapasForQuestionAnswering", config),
            lambda p: p(table=table, query="w15 w16"), tokenizer=T.TapasTokenizer(tmp_path / "vocab.txt"))


def test_video(tmp_path):
    av = pytest.importorskip("av")
    with av.open(tmp_path / "x.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 32
        for number in range(8):
            picture = np.random.RandomState(number).randint(0, 255, (32, 32, 3)).astype("uint8")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        container.mux(stream.encode())
    config = T.VideoMAEConfig(**VISION, num_frames=4, num_labels=3)
    compare("video-classification", seeded("VideoMAEForVideoClassification", config),
            lambda p: p(str(tmp_path / "x.mp4"), num_frames=4),
            image_processor=T.VideoMAEImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE))


def test_points_of_two_pictures():
    detector = T.SuperPointConfig(encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, keypoint_decoder_dim=65,
                                  descriptor_decoder_dim=16, keypoint_threshold=0.0, max_keypoints=12)
    config = T.SuperGlueConfig(keypoint_detector_config=detector, hidden_size=16, keypoint_encoder_sizes=[8, 16],
                               gnn_layers_types=["self", "cross"], num_attention_heads=2, sinkhorn_iterations=4)
    other = Image.fromarray(255 - np.asarray(PICTURE))
    compare("keypoint-matching", seeded("SuperGlueForKeypointMatching", config), lambda p: p([PICTURE, other]),
            image_processor=T.SuperGlueImageProcessor(size=SQUARE))
