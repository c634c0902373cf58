//! Tokenizer, detokenizer, chat templates, channel and tool-call parser, stop strings.
