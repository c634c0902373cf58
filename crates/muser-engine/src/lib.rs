//! Requests, scheduler, step loop, sampler, events, metrics.
