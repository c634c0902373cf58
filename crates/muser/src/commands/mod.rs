//! One file per command; each has `run(args, console)`, which returns when the command is done.

#![allow(
    clippy::needless_pass_by_value,
    reason = "a command owns its arguments, whether it keeps them or not"
)]

pub mod bench;
pub mod chat;
pub mod config;
pub mod convert;
pub mod cost;
pub mod detokenize;
pub mod doctor;
pub mod fit;
pub mod inspect;
pub mod logits;
pub mod models;
pub mod node;
mod node_list;
pub mod node_serve;
pub mod pack;
pub mod pull;
pub mod run;
pub mod serve;
pub mod shell;
pub mod synth;
pub mod tokenize;
pub mod top;
