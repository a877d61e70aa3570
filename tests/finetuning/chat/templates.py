"""Chat templates in the form of those of real models, and a tokenizer that has their special tokens."""

import json
import shutil
from pathlib import Path

import tokenizers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{{ ('<s>' if loop.first else '') + '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'"
    " + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""The system's message is a part of the first question."""
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if loop.last and system is defined %}"
    "{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}{% else %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% endif %}{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
"""The system's message is a part of the last question, which only exists if no answer follows."""
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
"""A text ends with the end of the turn and the end of the text."""
PHI_4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK_CODER = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n"
    "{% elif m.role == 'assistant' %}### Response:\n{{ m.content }}\n<|EOT|>\n{% else %}{{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}"
    "<|Assistant|>{% generation %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
"""The thoughts before an answer are left out."""
SPECIAL = (
    "<s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>",
    "<|end|>", "<|EOT|>", "<|User|>", "<|Assistant|>",
)  # fmt: skip


def write_speaker(folder: Path, tokenizer: Path, template: str, **settings: object) -> Path:
    """Write a tokenizer that has all special tokens, and a template, to a folder."""
    folder.mkdir(exist_ok=True)
    if tokenizer.parent != folder:
        shutil.copy(tokenizer, folder)
    inner = tokenizers.Tokenizer.from_file(str(tokenizer))
    inner.add_special_tokens(list(SPECIAL))
    inner.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(template)
    return folder / "tokenizer.json"
