//! The target `model_headers` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::MODEL_HEADERS);
