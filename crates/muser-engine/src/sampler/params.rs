//! Sampling parameters and their limits.

use crate::SubmitError;

/// How a token is drawn from the logits. The order of the filters is documented at [`crate::sampler`].
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits that the filters left. At most [`SamplingParams::GREEDY_BELOW`] means greedy.
    pub temperature: f32,
    /// Keep the `top_k` highest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the most probable tokens until their sum reaches `top_p`, at least one; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least `min_p` times as probable as the most probable one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of every token in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token in the output; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it is in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these ids. Negative infinity forbids an id.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    /// The published defaults: temperature 1, top-p 0.95, top-k 64, nothing else.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 64,
            top_p: 0.95,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Temperatures up to this are greedy: dividing by them would overflow or leave one token anyway.
    pub const GREEDY_BELOW: f32 = 1e-3;

    /// Always the most probable token, lowest id first among equals.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Is the most probable token always taken?
    pub fn is_greedy(&self) -> bool {
        self.temperature <= Self::GREEDY_BELOW || self.top_k == 1
    }

    /// How many ids the bias forbids, if it does nothing else.
    pub(crate) fn forbidden(&self) -> Option<usize> {
        self.logit_bias.iter().all(|(_, bias)| *bias == f32::NEG_INFINITY).then_some(self.logit_bias.len())
    }

    /// Is `id` forbidden by the bias?
    pub(crate) fn forbids(&self, id: u32) -> bool {
        self.logit_bias.iter().any(|&(other, bias)| other == id && bias == f32::NEG_INFINITY)
    }

    /// Does any penalty apply?
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Checks every figure; the error names the field.
    pub fn validate(&self, vocab: usize) -> Result<(), SubmitError> {
        let check = |field: &'static str, value: f32, expected: &str, ok: bool| {
            if ok {
                Ok(())
            } else {
                Err(SubmitError::Invalid { field, expected: expected.into(), found: value.to_string() })
            }
        };
        let t = self.temperature;
        check("temperature", t, "a finite number of at least 0", t.is_finite() && t >= 0.0)?;
        check("top_p", self.top_p, "a number from 0 to 1", (0.0..=1.0).contains(&self.top_p))?;
        check("min_p", self.min_p, "a number from 0 to 1", (0.0..=1.0).contains(&self.min_p))?;
        let r = self.repetition_penalty;
        check("repetition_penalty", r, "a finite number above 0", r.is_finite() && r > 0.0)?;
        let p = self.presence_penalty;
        check("presence_penalty", p, "a finite number", p.is_finite())?;
        let f = self.frequency_penalty;
        check("frequency_penalty", f, "a finite number", f.is_finite())?;
        for &(id, bias) in &self.logit_bias {
            if id as usize >= vocab {
                return Err(SubmitError::Invalid {
                    field: "logit_bias",
                    expected: format!("token ids below {vocab}"),
                    found: id.to_string(),
                });
            }
            check("logit_bias", bias, "a number below infinity", !bias.is_nan() && bias < f32::INFINITY)?;
        }
        Ok(())
    }
}
