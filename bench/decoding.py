"""Decoding throughput compared with transformers' MarianMTModel, with the same weights, sources and output lengths.

    python bench/decoding.py

Both programs run a random Transformer with the same weights and generate exactly `--length` tokens per source, then
the end token, which does not count. The last column is the number of equal outputs. Both run in one process and take
turns. The allocator settings of regard's command line apply to both. The figures are medians. Tokenisation is not
measured: both read and return ids.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from regard.batch import pad
from regard.decode.ensemble import Scorer, SearchInput
from regard.decode.request import Options
from regard.decode.search import search
from regard.device import tune_allocator
from regard.model import Model
from regard.presets import preset

SIZES = {
    "tiny": {"layers": 4, "width": 128, "heads": 4, "ff": 512},
    "base": {"layers": 6, "width": 512, "heads": 8, "ff": 2048},
}
VOCABULARY = 8000
Ids = list[list[int]]
Contender = Callable[[Ids, int, int], Ids]  # sources, beam, length -> outputs without the end token


def ours(model: Model) -> Contender:
    ids = model.config.ids
    scorer = Scorer([model], blocked=[ids.pad, ids.unk, ids.sos])

    def generate(sources: Ids, beam: int, length: int) -> Ids:
        tasks = [SearchInput((source,), limit=length, minimum=length, open_end=True) for source in sources]
        return [list(hypotheses[0].ids) for hypotheses in search(scorer, tasks, Options(beam=beam))]

    return generate


def theirs(model: Model) -> Contender:
    marian = marian_like(model)
    ids = model.config.ids

    def generate(sources: Ids, beam: int, length: int) -> Ids:
        source_BS, keep_BS = pad(sources, ids.pad)
        keep_BS = torch.ones_like(source_BS, dtype=torch.bool) if keep_BS is None else keep_BS
        out_BT = marian.generate(
            input_ids=source_BS,
            attention_mask=keep_BS.long(),
            num_beams=beam,
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length + 1,
            forced_eos_token_id=ids.eos,  # with probability 1 in transformers, so the end token does not count
            suppress_tokens=[ids.pad, ids.unk, ids.sos],
        )
        return out_BT[:, 1:-1].tolist()

    return generate


def marian_like(model: Model) -> MarianMTModel:
    """A MarianMTModel with the weights of `model`.

    Its positions have all sines before all cosines; in regard they alternate. Every vector is permuted accordingly.
    """
    config = model.config
    stack = config.decoder
    assert stack is not None
    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": stack.layers, f"{side}_attention_heads": stack.heads, f"{side}_ffn_dim": stack.ff}
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=config.target_vocab,
            d_model=stack.width,
            dropout=0.0,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=config.ids.pad,
            eos_token_id=config.ids.eos,
            decoder_start_token_id=config.start_id,
            max_position_embeddings=512,
            **sides,
        )
    ).eval()
    ours = dict(model.named_parameters())
    order = torch.cat((torch.arange(0, stack.width, 2), torch.arange(1, stack.width, 2)))
    weights: dict[str, Tensor] = {"model.shared.weight": ours["source_embedding.weight"][:, order]}

    def linear(theirs: str, weight: Tensor, bias: Tensor, reads: bool) -> None:
        """Copy a layer that reads or writes permuted vectors."""
        weights[f"{theirs}.weight"] = weight[:, order] if reads else weight[order]
        weights[f"{theirs}.bias"] = bias if reads else bias[order]

    def sublayer(theirs: str, name: str, kind: str) -> None:
        norm = "final" if kind == "feed_forward" else {"attention": "self_attn", "cross": "encoder_attn"}[kind]
        for part in ("weight", "bias"):
            weights[f"{theirs}.{norm}_layer_norm.{part}"] = ours[f"{name}.{kind}_residual.norm.{part}"][order]
        if kind == "feed_forward":
            linear(f"{theirs}.fc1", ours[f"{name}.{kind}.up.weight"], ours[f"{name}.{kind}.up.bias"], True)
            linear(f"{theirs}.fc2", ours[f"{name}.{kind}.down.weight"], ours[f"{name}.{kind}.down.bias"], False)
            return
        linear(f"{theirs}.{norm}.q_proj", ours[f"{name}.{kind}.query.weight"], ours[f"{name}.{kind}.query.bias"], True)
        pairs = zip(
            ("k_proj", "v_proj"),
            ours[f"{name}.{kind}.key_value.weight"].chunk(2),
            ours[f"{name}.{kind}.key_value.bias"].chunk(2),
            strict=True,
        )
        for part, weight, bias in pairs:
            linear(f"{theirs}.{norm}.{part}", weight, bias, True)
        linear(f"{theirs}.{norm}.out_proj", ours[f"{name}.{kind}.out.weight"], ours[f"{name}.{kind}.out.bias"], False)

    for side in ("encoder", "decoder"):
        for i in range(stack.layers):
            for kind in ("attention", "feed_forward", *(["cross"] if side == "decoder" else [])):
                sublayer(f"model.{side}.layers.{i}", f"{side}.blocks.{i}", kind)
    parameters = dict(marian.named_parameters())  # a shared table occurs once
    trained_names = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained_names == weights.keys(), trained_names ^ weights.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    return marian


def random_sources(count: int, longest: int) -> Ids:
    """Random tokens with an end token; lengths are between half the maximum and the maximum."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(longest // 2, longest, (count,), generator=draw).tolist()
    return [[*torch.randint(4, VOCABULARY, (n,), generator=draw).tolist(), 3] for n in sorted(lengths, reverse=True)]


def compare(contenders: Sequence[Contender], sources: Ids, beam: int, length: int, rounds: int) -> tuple[list, int]:
    """Median sentences per second of each contender, and the number of equal outputs."""
    ours, theirs = (generate(sources, beam, length) for generate in contenders)  # warm-up
    assert {len(output) for output in ours + theirs} == {length}, "the outputs differ in length"
    seconds: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for generate, times in zip(contenders, seconds, strict=True):
            began = time.perf_counter()
            generate(sources, beam, length)
            times.append(time.perf_counter() - began)
    rates = [len(sources) / statistics.median(times) for times in seconds]
    return rates, sum(a == b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--beam", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--length", type=int, default=30, help="output tokens; a source has 15 to 30")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    tune_allocator()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it logs every option that differs from its default
    print(f"sentences per second, median of {arguments.rounds} rounds; outputs of {arguments.length} tokens")
    print("size  threads  batch  beam    regard  transformers  ratio  same outputs")
    for size in arguments.size:
        torch.manual_seed(1)
        stack = SIZES[size] | {"dropout": 0.0}
        model = Model(preset("transformer-base", vocab=VOCABULARY, changes={"encoder": stack, "decoder": stack})).eval()
        contenders = (ours(model), theirs(model))
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for batch in arguments.batch:
                sources = random_sources(batch, 30)
                for beam in arguments.beam:
                    rates, same = compare(contenders, sources, beam, arguments.length, arguments.rounds)
                    print(
                        f"{size}  {threads:7}  {batch:5}  {beam:4}  {rates[0]:8.2f}  {rates[1]:12.2f}"
                        f"  {rates[0] / rates[1]:5.2f}  {same} of {batch}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
