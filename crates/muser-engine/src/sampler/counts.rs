//! Which tokens a sequence has seen, for the penalties. Exists only for requests that have one.

use super::SamplingParams;

/// Occurrences by token id, and the list of ids that occur.
#[derive(Debug)]
pub struct TokenCounts {
    /// Twice the number of occurrences in the output, plus 1 if the token occurs at all (prompt included).
    marks: Vec<u32>,
    seen: Vec<u32>,
}

impl TokenCounts {
    /// Nothing seen yet. `capacity` is the most tokens that may come (ids seen never exceed the vocabulary).
    pub fn new(vocab: usize, capacity: usize) -> Self {
        Self { marks: vec![0; vocab], seen: Vec::with_capacity(capacity.min(vocab)) }
    }

    /// A token of the prompt.
    pub fn push_prompt(&mut self, id: u32) {
        self.mark(id);
    }

    /// A token of the output. `true` if it had not occurred before.
    pub fn push_output(&mut self, id: u32) -> bool {
        let new = self.mark(id);
        if let Some(mark) = self.marks.get_mut(id as usize) {
            *mark = mark.saturating_add(2);
        }
        new
    }

    /// Undoes the [`TokenCounts::push_output`] that was last of those not undone, and answered `was_new`.
    pub fn take_back_output(&mut self, id: u32, was_new: bool) {
        if let Some(mark) = self.marks.get_mut(id as usize) {
            *mark = if was_new { 0 } else { mark.saturating_sub(2) };
        }
        if was_new {
            self.seen.pop();
        }
    }

    fn mark(&mut self, id: u32) -> bool {
        match self.marks.get_mut(id as usize) {
            Some(mark) if *mark == 0 => {
                *mark = 1;
                self.seen.push(id);
                true
            }
            _ => false,
        }
    }

    /// Changes the logits of the tokens seen.
    pub fn penalise(&self, params: &SamplingParams, logits: &mut [f32]) {
        for &id in &self.seen {
            let Some(logit) = logits.get_mut(id as usize) else { continue };
            if params.repetition_penalty != 1.0 {
                *logit = if *logit > 0.0 {
                    *logit / params.repetition_penalty
                } else {
                    *logit * params.repetition_penalty
                };
            }
            let in_output = self.marks[id as usize] / 2;
            if in_output > 0 {
                *logit -= params.presence_penalty + in_output as f32 * params.frequency_penalty;
            }
        }
    }
}
