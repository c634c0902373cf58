//! The target `pack_object` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::PACK_OBJECT);
