"""Adapter that answers lm-eval's requests with the model on all ranks.

Every rank runs lm-eval and gets the same requests. This module divides the requests among the data ranks.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import simple_parse_args_string

from crosscut.config import ConfigError
from crosscut.config.published.generation import check_generation
from crosscut.evaluation import Window, sliding_windows
from crosscut.evaluation.evaluate import score_with_progress
from crosscut.evaluation.progress import Bar
from crosscut.evaluation.ranks import joined_model
from crosscut.evaluation.scoring import require_numbers
from crosscut.evaluation.task import as_ids
from crosscut.generation import Decoder, Sampling
from crosscut.harness.arguments import MODEL, ModelArguments, refuse_cache, refuse_chat_template
from crosscut.harness.special_tokens import named_ids
from crosscut.model import GPT
from crosscut.planner import count_parameters
from crosscut.pretrained import ModelSource

_Pair = tuple[tuple[str, str], list[int], list[int]]
"""Pair of texts (context and continuation), followed by the token ids of each text."""

_LOG = logging.getLogger("lm_eval.crosscut")
"""Logger for warnings to the user. As a child of lm-eval's logger, it is silent on all ranks except the first."""


@register_model(MODEL)
class CrosscutLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Crosscut model for lm-eval. Texts are encoded in the same way as in lm-eval's own `hf` models.

    The name of a special token in a text is encoded as that token. If the model expects an id at the start of every
    text, the adapter puts this id before every text that does not already start with it. For other models, only an
    empty context gets an id: the begin-of-text id from the files beside the tokenizer or, if the files name no
    begin-of-text id, the end-of-text id.
    """

    def __init__(self, model: GPT, source: ModelSource, *, batch_size: int) -> None:
        super().__init__()
        self.model, self.source, self.batch_size = model, source, batch_size
        self.tokenizer = source.load_tokenizer()
        self.max_length = source.model.generation_length
        self.shown = model.mesh.is_first_rank
        named = named_ids(source.tokenizer, self.tokenizer)
        end, begin = named.get("eos_token"), named.get("bos_token", source.begin_of_text)
        self._end = source.end_of_text if end is None else end
        self._prefix = self._end if begin is None else begin
        check_generation(source.settings_folders, None, "")  # raises before the first task; `generate_until` tells

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, object], additional_config: Mapping[str, object] | None = None
    ) -> "CrosscutLM":
        """Load the model that `--model_args` (`arg_dict`) names. The ranks must already have been started, and every
        rank must call this function. `additional_config` holds lm-eval's options, such as `--batch_size`.

        Raises `ConfigError` or `LayoutError` for invalid arguments, and the errors of `joined_model`.
        """
        asked = ModelArguments.of(arg_dict, additional_config or {})
        asked.require_ranks()
        model, source = joined_model(asked.place, asked.on)
        return cls(model, source, batch_size=asked.batch_size)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, object] | None = None
    ) -> "CrosscutLM":
        """Load the model as `create_from_arg_obj` does, from arguments in the form `name=value,name=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, object]:
        """Return the name, number of parameters and layout of the model, for lm-eval's results."""
        return {
            "model_name": self.source.name,
            "model_num_parameters": count_parameters(self.source.model),
            "model_layout": str(self.model.mesh.layout),
        }

    def set_cache_hook(self, cache_hook: object) -> None:
        """Set the cache in which lm-eval stores answers. Raises `ConfigError` if the model is on several ranks."""
        if self.model.mesh.layout.world_size > 1:
            refuse_cache()
        super().set_cache_hook(cache_hook)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return an empty template, because texts are scored unchanged. Raises `ConfigError` if a chat template is
        requested.
        """
        if chat_template:
            refuse_chat_template()
        return ""

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """Id that precedes a text without context."""
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_options: object) -> list[int]:
        """Return the token ids of a text. If the model expects an id at the start of every text, this id comes first,
        unless `add_special_tokens` is false.
        """
        begin = None if add_special_tokens is False else self.source.begin_of_text
        return self.tokenizer.encode_prompt(string, begin=begin)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return, for each request, the natural logarithm of the continuation's probability given its context, and
        whether greedy decoding would generate the continuation.
        """
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[_Pair], **_options: object) -> list[tuple[float, bool]]:
        texts = [as_ids([*context, *continuation]) for _, context, continuation in requests]
        windows = []
        for number, (_, context, continuation) in enumerate(requests):
            stop = len(context) + len(continuation)
            start = max(0, stop - 1 - self.max_length)
            windows.append(Window(number, start, stop, max(start + 1, len(context))))
        bar = Bar("loglikelihood", self.shown)
        scores = score_with_progress(self.model, texts, windows, batch_size=self.batch_size, bar=bar)
        require_numbers("loglikelihood", scores.losses)
        return [
            (-float(loss), int(hits) == window.num_targets)
            for loss, hits, window in zip(scores.losses, scores.hits, windows, strict=True)
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:  # noqa: ARG002
        """Return the natural logarithm of each text's total probability. Long texts are split into windows of the
        model's maximum length, and every token is scored in exactly one window.

        If the model expects an id at the start of every text, the text begins with this id twice, as in lm-eval's `hf`
        models. The first occurrence is only context, and the second is scored.
        """
        texts = [as_ids([self.prefix_token_id, *self.tok_encode(request.args[0])]) for request in requests]
        length = self.max_length
        windows = [
            w for i, text in enumerate(texts) for w in sliding_windows(i, len(text), window=length, overlap=length)
        ]
        bar = Bar("rolling loglikelihood", self.shown)
        scores = score_with_progress(self.model, texts, windows, batch_size=self.batch_size, bar=bar)
        require_numbers("rolling loglikelihood", scores.losses)
        totals = np.zeros(len(texts))
        np.add.at(totals, [window.text for window in windows], -scores.losses)
        return [float(total) for total in totals]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:  # noqa: ARG002
        """Return the text that the model generates after each context. Every data rank generates the texts of all
        contexts.

        If a context and the tokens to generate do not fit into the window together, the context loses its first tokens,
        as in lm-eval's `hf` models. Raises `ConfigError` before the generation if no token of a context would remain.
        """
        samplings = [_sampling(request, self.max_length) for request in requests]
        for sampling in samplings[:1]:
            remedy = "The `generation_kwargs` of each task decide."
            for notice in check_generation(self.source.settings_folders, sampling, remedy):
                _LOG.warning(notice)
        decoder = Decoder(self.model, self.tokenizer, num_rows=self.batch_size, stops=self.source.stops)
        written: dict[int, str] = {}
        num_cut = 0
        for number, (request, sampling) in enumerate(zip(requests, samplings, strict=True)):
            ids = self.tok_encode(request.args[0]) or [self.prefix_token_id]
            room = self.max_length - sampling.num_tokens
            num_cut += len(ids) > room
            written[decoder.add(ids[-room:], sampling, sample=number)] = ""
        if num_cut:
            _LOG.warning(
                f"{num_cut} of {len(requests)} contexts lose their first tokens, because the model's window of "
                f"{self.max_length} tokens must also hold the generated text."
            )
        for piece in decoder.run():
            written[piece.number] += piece.text
        return list(written.values())


def _sampling(request: Instance, max_length: int) -> Sampling:
    """Return the sampling options of a request, with the same meaning as in lm-eval's `hf` models. Without `do_sample`,
    decoding is greedy.
    """
    asked = normalize_gen_kwargs(request.args[1])
    if asked["max_gen_toks"] >= max_length:
        raise ConfigError(
            f"`max_gen_toks` of the task `{request.task_name}` must be at most {max_length - 1}, but is "
            f"{asked['max_gen_toks']} (lm-eval's default is 256). The model's window of {max_length} tokens must hold "
            "the context and the generated text. Lower `max_gen_toks` in the task's `generation_kwargs`, or use a "
            "model with a longer window."
        )
    return Sampling(
        num_tokens=asked["max_gen_toks"],
        temperature=asked.get("temperature", 0.0) if not asked["do_sample"] else asked.get("temperature") or 1.0,
        top_k=asked.get("top_k", 0),
        top_p=asked.get("top_p", 1.0),
        stop=tuple(text for text in asked["until"] if text),
    )
