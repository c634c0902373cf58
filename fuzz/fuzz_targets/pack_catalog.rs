//! The target `pack_catalog` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::PACK_CATALOG);
