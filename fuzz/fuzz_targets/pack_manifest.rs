//! The target `pack_manifest` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::PACK_MANIFEST);
