//! The target `histories` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::HISTORIES);
