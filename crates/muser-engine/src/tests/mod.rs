//! The engine with the scripted executor: exactness under random schedules, limits, cancellation, faults, allocation.

mod allocation;
mod basics;
mod drafts;
mod faults;
mod handoff;
mod images;
mod masks;
mod prefix;
mod prompt_logprobs;
mod schedules;
mod shortcuts;
mod threads;
