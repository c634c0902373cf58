//! The target `schema` of `muser-fuzzing`.
#![no_main]
muser_fuzz::program!(muser_fuzzing::SCHEMA);
