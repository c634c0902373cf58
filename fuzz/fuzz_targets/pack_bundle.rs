//! The target `pack_bundle` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::PACK_BUNDLE);
