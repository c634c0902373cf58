//! Sets of chunk numbers: what somebody holds.

use std::ops::Range;

use crate::Refusal;
use crate::encode::{Reader, Writer};

/// Most ranges in a set on the wire.
pub const MAX_RANGES: usize = 8_192;

/// A set of numbers as ascending ranges with gaps between them, so that equal sets are equal bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet(Vec<Range<u32>>);

impl RangeSet {
    /// Is the number in it?
    pub fn contains(&self, number: u32) -> bool {
        let after = self.0.partition_point(|range| range.start <= number);
        after > 0 && number < self.0[after - 1].end
    }

    /// Adds a range.
    pub fn insert(&mut self, range: Range<u32>) {
        if range.is_empty() {
            return;
        }
        // Those that touch it become one with it.
        let first = self.0.partition_point(|other| other.end < range.start);
        let last = self.0.partition_point(|other| other.start <= range.end);
        let mut joined = range;
        for other in &self.0[first..last] {
            joined = joined.start.min(other.start)..joined.end.max(other.end);
        }
        self.0.splice(first..last, [joined]);
    }

    /// Both together.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut all = self.clone();
        other.0.iter().for_each(|range| all.insert(range.clone()));
        all
    }

    /// What is in it and not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        for range in &self.0 {
            let mut from = range.start;
            let first = other.0.partition_point(|gone| gone.end <= from);
            for gone in other.0[first..].iter().take_while(|gone| gone.start < range.end) {
                if gone.start > from {
                    left.push(from..gone.start);
                }
                from = from.max(gone.end);
            }
            if from < range.end {
                left.push(from..range.end);
            }
        }
        Self(left)
    }

    /// How many numbers.
    pub fn len(&self) -> u64 {
        self.0.iter().map(|range| u64::from(range.end - range.start)).sum()
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges, ascending.
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.0
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flat_map(Clone::clone)
    }

    /// One past the last number.
    pub fn end(&self) -> u32 {
        self.0.last().map_or(0, |range| range.end)
    }

    pub(crate) fn encode(&self, writer: &mut Writer) {
        writer.list(&self.0, |writer, range| {
            writer.u32(range.start);
            writer.u32(range.end);
        });
    }

    pub(crate) fn decode(reader: &mut Reader<'_>, field: &'static str) -> Result<Self, Refusal> {
        let mut before = None;
        let ranges = reader.list(field, MAX_RANGES, 8, |reader| {
            let range = reader.u32(field)?..reader.u32(field)?;
            // Empty, out of order, overlapping or touching: another writer would have said it differently.
            if range.is_empty() || before.is_some_and(|end| range.start <= end) {
                return Err(Refusal::Malformed { field, found: u64::from(range.start) });
            }
            before = Some(range.end);
            Ok(range)
        })?;
        Ok(Self(ranges))
    }
}

impl From<Range<u32>> for RangeSet {
    fn from(range: Range<u32>) -> Self {
        let mut set = Self::default();
        set.insert(range);
        set
    }
}

impl FromIterator<Range<u32>> for RangeSet {
    fn from_iter<I: IntoIterator<Item = Range<u32>>>(ranges: I) -> Self {
        let mut set = Self::default();
        ranges.into_iter().for_each(|range| set.insert(range));
        set
    }
}
