//! The target `http_heads` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::HTTP_HEADS);
