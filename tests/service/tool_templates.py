"""Chat templates that know tools, written as Qwen's and Llama 3's do it, and no longer than need be."""

HERMES = """
{%- if tools %}<|user|>You may call functions:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Call them as <tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
<|user|><tool_response>
{{ message.content }}
</tool_response>
{%- elif message.role == 'assistant' %}
<|assistant|>{{ message.content }}
{%- for tool_call in message.tool_calls %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- else %}
<|user|>{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>{% endif %}"""

LLAMA = """
{%- if tools is not none %}<|user|>Environment: ipython
Answer with a call {"name": function name, "parameters": dictionary of argument name and its value}.
{%- for tool in tools %}
{{ tool | tojson(indent=4) }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
<|user|>ipython: {{ message.content | tojson }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
<|assistant|>{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}
{{ '<|user|>' if message.role == 'user' else '<|assistant|>' }}{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>{% endif %}"""
