"""The adapters of other packages' kernels, on the CPU: functions with those packages' own signatures stand in for them.

The stand-ins compute what the packages document, segment by segment, from exactly what they are given: where a wrong offset,
length or stride would make the real one read elsewhere, they read elsewhere, too. `tests/gpu` runs what is installed.
"""

import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from test_attention import LAYOUTS, packed, prefix_sums, within_budget

from vitcg_backend.attention import KERNELS, SegmentBounds, choose, flash_attn_package, flashinfer_cudnn
from vitcg_backend.errors import AttentionUnavailable

CUDA, BF16 = torch.device("cuda"), torch.bfloat16


def sdpa(q, k, v, scale):
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def by_borders(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale):
    """What both releases of flash-attn compute; rows of no segment, and those past the bounds, stay unwritten."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == max_seqlen_q > 1
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    for start, end in itertools.pairwise(cu_seqlens_q.tolist()):
        if start < end:
            out[start:end] = sdpa(q[start:end], k[start:end], v[start:end], softmax_scale)
    return out


def flash_attn_2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                 causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                 return_attn_probs=False, block_table=None):  # fmt: skip
    """flash_attn/flash_attn_interface.py of flash-attn 2.8.3.post2."""
    assert (dropout_p, causal, window_size, softcap, return_attn_probs) == (0.0, False, (-1, -1), 0.0, False)
    return by_borders(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale)


def flash_attn_3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                 softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                 window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                 sm_margin=0, return_attn_probs=False):  # fmt: skip
    """hopper/flash_attn_interface.py of flash-attention, commit 01afd16d248c."""
    assert (seqused_q, seqused_k, causal, qv, return_attn_probs) == (None, None, False, None, False)
    return by_borders(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale)


def flash_attn_3_beta(*args, **kwargs):
    """Early releases also give the logarithms of the sums."""
    return flash_attn_3(*args, **kwargs), None


def flashinfer(q, k_cache, v_cache, scale, workspace_buffer, *, max_token_per_sequence, max_sequence_kv,
               actual_seq_lens_q=None, actual_seq_lens_kv=None, block_tables=None, causal, return_lse, q_scale=None,
               k_scale=None, v_scale=None, batch_offsets_q=None, batch_offsets_o=None, batch_offsets_k=None,
               batch_offsets_v=None, batch_offsets_stats=None, batch_offsets_units="elements", out=None, lse=None,
               is_cuda_graph_compatible=False, backend=None, o_data_type=None, lse_base="log2", window_left=None,
               sinks=None):  # fmt: skip
    """flashinfer/cudnn/prefill.py of flashinfer-python 0.7.4."""
    assert (block_tables, causal, return_lse, batch_offsets_units) == (None, False, False, "elements")
    count = actual_seq_lens_q.shape[0]
    assert actual_seq_lens_q.shape == actual_seq_lens_kv.shape == (count, 1, 1, 1)
    assert workspace_buffer.nbytes >= 128 << 20
    assert out.is_contiguous()
    offsets = (batch_offsets_q, batch_offsets_k, batch_offsets_v, batch_offsets_o)
    assert all(x.shape == (count + 1,) and x.dtype == torch.int32 for x in offsets)
    out.fill_(float("nan"))
    for i in range(count):
        rows = int(actual_seq_lens_q[i])
        assert rows == int(actual_seq_lens_kv[i]) <= max_token_per_sequence == max_sequence_kv
        if rows:
            q_, k_, v_, out_ = (
                x.as_strided((rows, *x.shape[1:]), x.stride(), x.storage_offset() + int(starts[i]))
                for x, starts in zip((q, k_cache, v_cache, out), offsets, strict=True)
            )
            out_.copy_(sdpa(q_, k_, v_, scale))
    return out, None


STAND_INS = {
    "flash-attn 2": ("flash_attn", flash_attn_package, "_function", flash_attn_2),
    "flash-attn 3": ("flash_attn", flash_attn_package, "_function", flash_attn_3),
    "flash-attn 3 beta": ("flash_attn", flash_attn_package, "_function", flash_attn_3_beta),
    "flashinfer": ("flashinfer", flashinfer_cudnn, "_import", flashinfer),
}


@pytest.fixture(params=STAND_INS)
def kernel(request, monkeypatch):
    """Each adapter, over its stand-in."""
    name, module, finder, function = STAND_INS[request.param]
    monkeypatch.setattr(module, finder, lambda *_: (function, None))
    return KERNELS[name]


def run(kernel, q, k, v, lengths, *, spare=0, longest=None):
    bounds = SegmentBounds(q.shape[0], len(lengths) + spare, longest or max(lengths))
    return kernel.forward(q, k, v, kernel.metadata(prefix_sums(lengths), bounds), bounds, 0.11)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_error_is_at_most_twice_that_of_eager(kernel, layout, kv_heads):
    """Every row of every layout, empty segments and a long one among short ones too, is that of its own segment."""
    lengths = LAYOUTS[layout]
    q, k, v = packed(lengths, kv_heads=kv_heads)
    for spare, longest in ((0, None), (30, 500)):
        out = run(kernel, q, k, v, lengths, spare=spare, longest=longest)
        assert out.is_contiguous()
        within_budget(out, q, k, v, lengths, 0.11)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_last_row_of_every_segment(kernel, length):
    """The last row of each segment is computed, and a padded tail that is a segment is too."""
    lengths = [length, length, 7]
    q, k, v = packed(lengths)
    out = run(kernel, q, k, v, lengths, spare=5)
    for end in prefix_sums(lengths)[1:]:
        assert out[end - 1].isfinite().all()
    within_budget(out, q, k, v, lengths, 0.11)


def test_segments_of_one_row(kernel):
    """Segments of one row each, with query heads that share keys, are no decoding: empty ones may be among them."""
    lengths = [1, 0] * 20
    q, k, v = packed(lengths, kv_heads=1)
    within_budget(run(kernel, q, k, v, lengths, spare=3), q, k, v, lengths, 0.11)


def test_few_plans_of_cudnn(monkeypatch):
    """What cuDNN plans for, segments and the longest of them, are powers of two, whatever the bounds are."""
    plans = set()

    def planned(q, *args, **kwargs):
        plans.add((kwargs["actual_seq_lens_q"].shape[0], kwargs["max_token_per_sequence"]))
        return flashinfer(q, *args, **kwargs)

    monkeypatch.setattr(flashinfer_cudnn, "_import", lambda: (planned, None))
    for lengths in ([33], [40] * 3, [64, 1], [50] * 16):
        q, k, v = packed(lengths)
        within_budget(run(KERNELS["flashinfer"], q, k, v, lengths), q, k, v, lengths, 0.11)
    assert plans == {(16, 64)}


def test_rows_of_different_widths(kernel):
    """q, k and v need not lie in one buffer: each has strides of its own."""
    lengths = [40, 3, 0, 21]
    q, _, v = packed(lengths)
    k = packed(lengths, heads=5)[1].contiguous()
    within_budget(run(kernel, q, k, v, lengths), q, k, v, lengths, 0.11)


def test_no_row_stays_unwritten(kernel):
    """Segments that leave rows out are refused, with what to do."""
    with pytest.raises(ValueError, match=r"ends at 8, the bucket has 10 rows.*add segments that cover the padded"):
        kernel.metadata([0, 8], SegmentBounds(10, 4, 8))


def test_no_rows(kernel):
    """A call without rows gives none."""
    q, k, v = packed([0])
    bounds = SegmentBounds(0, 0, 0)
    assert kernel.forward(q, k, v, kernel.metadata([0], bounds), bounds, 1.0).shape == (0, 2, 72)


def test_values_of_another_size(kernel):
    """Values of another head size than the keys' are refused."""
    q, k, v = packed([5])
    with pytest.raises(ValueError, match="needs values of the keys' head size 72, not 64"):
        run(kernel, q, k, v[..., :64], [5])


def test_offsets_beyond_32_bits(monkeypatch):
    """Offsets have 32 bits: where a row would lie beyond, the call is refused."""
    monkeypatch.setattr(flashinfer_cudnn, "_LARGEST_OFFSET", 5 * 432 - 1)
    q, k, v = packed([5])
    with pytest.raises(ValueError, match="32-bit offsets: 5 rows of 432 elements"):
        run(KERNELS["flashinfer"], q, k, v, [5])


class TestReasons:
    """Why a package's kernel cannot run, in the order in which it is asked."""

    @pytest.fixture(autouse=True)
    def on_a_gpu(self, monkeypatch):
        """A device of compute capability 8.6, and nothing installed yet."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        for module in (flash_attn_package, flashinfer_cudnn):
            module._import.cache_clear()
            monkeypatch.setattr(module, "find_spec", lambda name: None)
        yield
        for module in (flash_attn_package, flashinfer_cudnn):
            module._import.cache_clear()

    @pytest.mark.parametrize(
        ("name", "device", "dtype", "dim", "text"),
        [
            ("flash_attn", "cpu", BF16, 72, "flash-attn needs a CUDA device, not cpu"),
            ("flash_attn", "cuda", torch.float32, 72, "flash-attn needs float16 or bfloat16, not torch.float32"),
            ("flash_attn", "cuda", BF16, 260, "flash-attn needs a head size that is a multiple of 8 up to 256, not 260"),
            ("flash_attn", "cuda", BF16, 72, "the module flash_attn is not installed"),
            ("flashinfer", "cpu", BF16, 72, "cuDNN's attention needs a CUDA device, not cpu"),
            ("flashinfer", "cuda", torch.float64, 72, "cuDNN's attention needs float16 or bfloat16, not torch.float64"),
            ("flashinfer", "cuda", BF16, 136, "cuDNN's attention needs a head size that is a multiple of 8 up to 128, not 136"),
            ("flashinfer", "cuda", BF16, 72, "the package flashinfer-python is not installed"),
        ],
    )
    def test_text(self, name, device, dtype, dim, text):
        """Device, dtype, head size and package each have their own reason, with what was seen."""
        assert KERNELS[name].unusable(torch.device(device), dtype, dim) == text

    @pytest.mark.parametrize(("name", "package"), [("flash_attn", "flash-attn"), ("flashinfer", "cuDNN's attention")])
    def test_old_device(self, monkeypatch, name, package):
        """A device that is too old is named."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        reason = KERNELS[name].unusable(CUDA, BF16, 72)
        assert reason == f"{package} needs compute capability 8.0 or more (a GPU)"

    def test_broken_package(self, monkeypatch):
        """A package that is there and cannot be imported says why."""
        monkeypatch.setattr(flash_attn_package, "find_spec", lambda name: name)
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        reason = KERNELS["flash_attn"].unusable(CUDA, BF16, 72)
        assert reason is not None
        assert reason.startswith("flash_attn cannot be imported (ModuleNotFoundError")

    def test_error_of_choose(self):
        """Asked for by name, the error gives the reason and what can run."""
        with pytest.raises(AttentionUnavailable, match=r"attention='flash_attn' cannot run on cpu .*flash-attn needs a CUDA"):
            choose("flash_attn", "cpu", BF16, 72)

    @pytest.mark.parametrize(("capability", "expected"), [((9, 0), "three"), ((8, 0), "two"), ((10, 0), "two")])
    def test_which_flash_attn(self, monkeypatch, capability, expected):
        """FlashAttention 3 serves Hopper where it is installed, FlashAttention 2 what else there is."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(flash_attn_package, "find_spec", lambda name: name)
        for module, function in (("flash_attn", "two"), ("flash_attn_interface", "three")):
            monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(flash_attn_varlen_func=function))
        assert flash_attn_package._function(CUDA) == (expected, None)
