"""What the fields of requests mean, by name: a line each for `/openapi.json` and `/docs`.

Types, bounds and defaults are those of the schemas that check requests, and a field that is refused
says why in its schema (`UNSUPPORTED`); neither is repeated here.
"""

_DEFAULT = "null: the model's own (generation_config), else"

FIELDS = {
    "model": "Any name: the server has one model, and says which in its answer. Where it has "
    "adapters: the model's name or one of theirs.",
    "lora_request": "The adapter to run with, by its name.",
    "lora_name": "Name of an adapter.",
    "lora_int_id": "A number that TensorRT-LLM and vLLM give adapters; the name is enough.",
    "lora_path": "Folder of the adapter, where clients may name some "
    "(lora_config.allow_runtime_updating).",
    "lora_ckpt_source": "Layout of the folder; hf is PEFT's.",
    "load_inplace": "Replace an adapter of the same name.",
    "messages": "The conversation, oldest first. Only an assistant may leave out the content.",
    "prompt": "A text, a list of texts, the token ids of one, or a list with those of several.",
    "max_tokens": "Longest output, in tokens. null: as long as the context allows. "
    "0 with echo: the prompt is scored and nothing is generated (completions).",
    "max_completion_tokens": "The same as max_tokens.",
    "n": "Outputs to return for each prompt.",
    "best_of": "Outputs to generate for each prompt; the n likeliest are returned.",
    "use_beam_search": "Look for the likeliest outputs: best_of beams, or n, and the best n are "
    "returned.",
    "length_penalty": "Of a beam search: log-probabilities are divided by length to this power.",
    "early_stopping": "Of a beam search: true ends it with as many outputs as beams; false (0) "
    "when a better one is not likely; never (another number than 0 and 1) when none can come.",
    "stream": "Send server-sent events as tokens come, then `data: [DONE]`.",
    "stream_options": "How to stream; only with stream.",
    "include_usage": "Send a last event with the numbers of tokens.",
    "continuous_usage_stats": "Send the numbers of tokens with each event.",
    "temperature": f"0 always takes the likeliest token. {_DEFAULT} 1.",
    "top_p": f"Share of the likeliest tokens to sample from. {_DEFAULT} 1.",
    "top_k": f"Number of the likeliest tokens to sample from; 0 or -1: all. {_DEFAULT} 0.",
    "min_p": f"Leave out tokens below this share of the likeliest one. {_DEFAULT} 0.",
    "repetition_penalty": f"Above 1: against tokens of prompt and output. {_DEFAULT} 1.",
    "presence_penalty": f"Above 0: against tokens of the output, once. {_DEFAULT} 0.",
    "frequency_penalty": f"Above 0: against tokens of the output, by their number. {_DEFAULT} 0.",
    "seed": "The same seed and request give the same output. null: drawn.",
    "stop": "Texts that end the output; they are not part of it.",
    "stop_token_ids": "Token ids that end the output.",
    "include_stop_str_in_output": "Leave the stop text in the output.",
    "ignore_eos": "Do not end at the model's end-of-text token.",
    "min_tokens": "Tokens before which the output does not end.",
    "thinking_token_budget": "Tokens after which reasoning is closed.",
    "logit_bias": "Added to the logits of tokens, by token id.",
    "allowed_token_ids": "Nothing but these tokens may be drawn, the end token included.",
    "bad_words": "Texts of up to 8 tokens that the output does not hold, with a space before them "
    "or without.",
    "logits_processors": "Names of processors that the server has loaded, or objects with qualname "
    "and kwargs.",
    "return_token_ids": "Return the ids of the prompt and of the output, without the one that "
    "ended it.",
    "return_tokens_as_token_ids": "Name tokens as token_id:ID in logprobs.",
    "request_id": "Becomes part of the id of the response. Letters, digits, . : _ -",
    "include_reasoning": "false: leave reasoning out of the message.",
    "logprobs": "Log probabilities of the output tokens: true for a chat; for completions the "
    "number of alternatives to each.",
    "top_logprobs": "Alternatives to each output token; needs logprobs.",
    "suffix": "Text behind the output, for models that were taught to fill in the middle.",
    "logprob_token_ids": "Tokens whose log probabilities are returned in place of the likeliest "
    "ones; needs logprobs.",
    "prompt_logprobs": "Log probabilities of the prompt's tokens, with so many alternatives.",
    "echo": "Begin the output with the prompt; in a chat with the assistant's words that it "
    "continues.",
    "detokenize": "false: return token ids and no text.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put spaces around special tokens in the text.",
    "truncate_prompt_tokens": "Keep the last so many tokens of the prompt; -1: all that fit.",
    "add_special_tokens": "Add the tokenizer's special tokens, such as the one at the beginning.",
    "priority": "Larger runs first, among requests of the same key; above 0 a key must be allowed "
    "to.",
    "cache_salt": "Cached prefixes are shared only with requests that have the same.",
    "tools": "Functions that the model may call.",
    "tool_choice": "auto: the model decides; none: tools are not shown to it; required: it calls "
    "one; a function by its name: it calls that one.",
    "response_format": "What the output must be: text, json_object, json_schema, json (with "
    "schema), regex, ebnf or structural_tag.",
    "structured_outputs": "The same as response_format, in vLLM's words: one of json, regex, "
    "choice, grammar, json_object, structural_tag.",
    "guided_json": "A JSON Schema that the output matches.",
    "guided_regex": "A regular expression that the whole output matches.",
    "guided_choice": "The output is one of these.",
    "guided_grammar": "A grammar in EBNF that the output matches.",
    "guided_whitespace_pattern": "A regular expression of the whitespace between parts of JSON.",
    "guided_decoding_backend": "Accepted names of backends; all mean llguidance.",
    "parallel_tool_calls": "false: at most one call is returned.",
    "reasoning_effort": "For models whose chat template knows it.",
    "verbosity": "For models whose chat template knows it.",
    "prompt_token_ids": "The whole prompt as token ids; messages are then not rendered.",
    "add_generation_prompt": "End the prompt with the opening of the assistant's turn.",
    "continue_final_message": "Go on with the last message, which must be an assistant's.",
    "chat_template": "A Jinja template for these messages, where the server trusts those of "
    "requests (trust_request_chat_template).",
    "chat_template_kwargs": "Passed on to the chat template.",
    "user": "Not used.",
    "metadata": "Of a batch or a response: kept with it, at most 16 texts. Elsewhere not used.",
    "service_tier": "Not used.",
    "store": "Of a response: false does not store it; null: stored, where the server stores any. "
    "Elsewhere not used: nothing is stored.",
    "input": "A text, or the items of a conversation: messages, function calls and their outputs, "
    "reasoning. Of embeddings: as prompt of completions.",
    "instructions": "A system message before the conversation; the next response does not "
    "inherit it.",
    "previous_response_id": "A stored response whose conversation goes on.",
    "background": "Return at once; the response is asked for with GET until it has ended.",
    "max_output_tokens": "Longest output, in tokens, reasoning included. null: as long as the "
    "context allows.",
    "max_tool_calls": "Of tools that the server runs, and it runs none.",
    "reasoning": "How the model reasons.",
    "effort": "For models whose chat template knows it.",
    "summary": "Nothing is summarized: reasoning is returned as it is.",
    "generate_summary": "The same as summary.",
    "text": "What the text of the output is like.",
    "format": "As response_format of a chat; name and schema of a JSON schema stand beside its "
    "type.",
    "system": "A system message before the conversation, as a text or as text blocks.",
    "stop_sequences": "Texts that end the output; they are not part of it.",
    "thinking": "enabled or adaptive: the model thinks where its chat template can switch that; "
    "disabled: it does not, and thinking is left out of the message.",
    "budget_tokens": "Less than max_tokens; after so many tokens thinking is closed.",
    "disable_parallel_tool_use": "true: at most one call is returned.",
    "display": "Nothing is summarized: thinking is returned as it is.",
    "output_config": "Effort, and the format of the output.",
    "cache_control": "Type ephemeral, ttl 5m or 1h. Changes nothing: every prefix is kept while "
    "there is room, and usage says how much of one was found.",
    "truncation": "auto: the oldest turns are left out where the conversation is too long; "
    "disabled: it is refused.",
    "include": "message.output_text.logprobs: log probabilities of the output tokens.",
    "include_obfuscation": "Nothing is added to events.",
    "safety_identifier": "Not used.",
    "prompt_cache_key": "Not used: prefixes are found by themselves.",
    "encoding_format": "float: a list of numbers; base64: the bytes of 32-bit floats, the lowest "
    "first.",
    "dimensions": "Return the first so many numbers, of length 1 again. null: all.",
    "normalize": "false: embeddings as the model has them. null: of length 1, unless the model's "
    "folder says otherwise.",
    "text_1": "A text for all of text_2, or as many.",
    "text_2": "A text, or a list of them.",
    "query": "What documents are looked for.",
    "documents": "For chat templates that take documents. Of rerank: the texts to sort.",
    "instruction": "What the query is for, in the words of the model. null: a web search where the "
    "model scores, nothing where it embeds.",
    "top_n": "Return the best so many. null: all.",
    "return_documents": "false: without the documents.",
    "return_token_strs": "Return the text of each token, too.",
    "tokens": "Token ids.",
    "input_file_id": "A file of POST /v1/files, at most 50,000 requests.",
    "endpoint": "Where the requests of the file go.",
    "completion_window": "After it the batch expires.",
    "file": "JSON lines with custom_id, method, url and body.",
    "purpose": "What the file is for.",
}
