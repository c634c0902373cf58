//! The HTTP interface: OpenAI, Anthropic, Ollama and llama-server shapes over one engine.
//!
//! A request's path: [`listen`] drives the connection, [`auth`] guards it, a file of [`routes`] checks the body
//! against its table ([`fields`]) and turns it into a generation; the answer's pieces take the route's shape and leave as one body or as a stream ([`sse`]). Only this crate knows JSON shapes of APIs; only
//! `muser-engine` knows what a request is.

#![allow(
    clippy::needless_pass_by_value,
    reason = "JSON values are made to be given away, but the json macro only borrows them"
)]

mod activity;
pub mod answer;
pub mod app;
pub mod auth;
pub mod backend;
pub mod believed;
mod bodies;
pub mod body;
mod body_budget;
pub mod config;
pub mod conversation;
pub mod custom_tools;
pub mod dashboard;
pub mod describe;
pub mod engine_backend;
pub mod error;
mod exposition;
pub mod fields;
mod form;
#[doc(hidden)]
pub mod fuzzing;
pub mod generation;
pub mod generation_params;
pub mod keys;
pub mod listen;
mod listeners;
mod masks;
pub mod metrics;
mod node_metrics;
pub mod nodes;
mod notice;
pub mod owner;
pub mod packs;
pub mod params;
pub mod pictures;
pub mod places;
mod refusal;
mod refusals;
mod registration;
pub mod routes;
mod shorten;
mod shown_path;
pub mod slot_book;
pub mod sse;
pub mod text;
mod tls;
mod version_timeout;
mod work_room;
mod write_timeout;
mod wrong_keys;

pub use app::{App, ModelFacts, SharedApp};
pub use config::{Limits, ServerConfig, ShutdownPolicy};
pub use engine_backend::LiveEngine;
pub use error::ServerError;
pub use listen::{Reloader, Server};
pub use packs::Packs;
