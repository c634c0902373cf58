//! The target `bucket_answers` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::BUCKET_ANSWERS);
