//! What several test modules need: the tokenizer of the bundled model.

use crate::Tokenizer;
use muser_gguf::GgufFile;
use std::sync::{Arc, LazyLock};

/// The bundled model file.
pub(crate) fn tiny_file() -> &'static GgufFile {
    static FILE: LazyLock<GgufFile> = LazyLock::new(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/muse-tiny-Q4_K_M.gguf");
        GgufFile::open(path).expect("the bundled model is in the repository")
    });
    &FILE
}

/// Its tokenizer: 4,084 ordinary tokens and twelve markers.
pub(crate) fn tiny_tokenizer() -> &'static Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> =
        LazyLock::new(|| Arc::new(Tokenizer::from_gguf(tiny_file()).expect("the bundled model is valid")));
    &TOKENIZER
}
