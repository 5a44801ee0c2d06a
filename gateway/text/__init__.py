"""How does text become token ids and token ids text? Tokenizer, incremental decoding, stop strings, chat template."""
