//! The target `hub_text` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::HUB_TEXT);
