# ruff: noqa: E501
"""Minimal equivalents of published chat templates: what each family's own does with roles, tools and thoughts."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# A default system message; tools in the system's turn; tool answers as the user's.
QWEN25 = """{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You are Qwen.' }}

# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role != 'system' %}<|im_start|>system
You are Qwen.<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif not (m.role == 'system' and loop.first and tools) %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Thoughts are written in the turns after the user's last words alone; empty ones, where there are none, in the last.
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content else m.content %}
{%- set thought = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# The same without thinking: the prompt begins the answer with empty thoughts.
QWEN3_SILENT = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}",
)

# A date, tools as the user's first words, one call a turn, tool answers from `ipython`.
LLAMA31 = """{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- set given = messages[1:] if messages[0].role == 'system' else messages %}
{{- (messages[0].content | trim if messages[0].role == 'system' else '') + '<|eot_id|>' }}
{%- for m in given %}
{%- if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson + '\\n\\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# User and assistant in turns; no prompt of its own; the end of an answer is the end of the text.
MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""

# No system role, and the assistant is called `model`.
GEMMA2 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
# The system's words before the user's first.
GEMMA3 = GEMMA2.replace(
    "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
    "{%- set ns = namespace(first='') %}{% if messages[0].role == 'system' %}{% set ns.first = messages[0].content + "
    "'\\n\\n' %}{% set messages = messages[1:] %}{% endif %}",
).replace("+ '\\n' + m.content | trim", "+ '\\n' + (ns.first if loop.first else '') + m.content | trim")

PHI3 = """{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Thoughts of earlier turns are left out, arguments of a call are written as they are, and the prompt begins a thought.
DEEPSEEK = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.tool_calls %}{{ '<｜Assistant｜>' + (m.content or '') }}
{%- for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + call.function.name + '\\n' + call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# By family: the template and its special tokens, the first two of them being bos and eos.
FAMILIES = {
    "ChatML": (CHATML, IM),
    "Qwen 2.5": (QWEN25, IM),
    "Qwen 3": (QWEN3, IM),
    "Qwen 3 without thinking": (QWEN3_SILENT, IM),
    "Llama 3.1": (
        LLAMA31,
        ["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    ),
    "Mistral": (MISTRAL, ["<s>", "</s>"]),
    "Gemma 2": (GEMMA2, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]),
    "Gemma 3": (GEMMA3, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]),
    "Phi-3": (PHI3, ["<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]),
    "DeepSeek": (
        DEEPSEEK,
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
        + [f"<｜tool▁{what}▁{end}｜>" for what in ("call", "output") for end in ("begin", "end")],
    ),
    "with marks": (MARKED, IM),
}
