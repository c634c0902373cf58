//! The target `hub_answers` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::HUB_ANSWERS);
