//! Which rows a block has: layers by group and component, each in the canonical layout
//! ([`muser_backend::kv_layout`]).

use std::ops::Range;

use muser_backend::arith::attention::Digits;
use muser_backend::kv_layout::HeadLayout;
use muser_kv::{BLOCK_LEN, KvGroup};

use crate::Refusal;
use crate::encode::{Reader, Writer};

/// Most bytes of a chunk's rows. A layer of a block of the 30B model has 260 KiB (256 positions of 1,040 bytes: 1,024 of digits
/// and 16 of scales), so a limit of 256 KiB would cut every one of them in two; models with more heads are cut by rows.
pub const MAX_CHUNK_BYTES: usize = 320 * 1024;

/// Whose layers: a consumer takes those of the model with or without those of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// The model itself.
    Target,
    /// The draft that proposes for it.
    Draft,
}

/// Equal layers of one group and component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Whose blocks they are in.
    pub group: KvGroup,
    /// Whose layers they are.
    pub component: Component,
    /// How many.
    pub layers: u16,
    /// KV heads.
    pub heads: u16,
    /// Values of a head, a multiple of 4.
    pub dim: u16,
    /// Digits of a value.
    pub digits: Digits,
}

impl Plane {
    /// Bytes of a layer of a block.
    pub fn layer_bytes(&self) -> usize {
        usize::from(self.heads) * self.head().bytes()
    }

    /// Bytes of a position in a layer.
    pub fn row_bytes(&self) -> usize {
        self.layer_bytes() / BLOCK_LEN
    }

    /// Rows of a chunk: all of a layer's, where they are few enough bytes.
    pub fn chunk_rows(&self) -> usize {
        let mut rows = BLOCK_LEN;
        while rows > 1 && rows * self.row_bytes() > MAX_CHUNK_BYTES {
            rows /= 2;
        }
        rows
    }

    fn head(&self) -> HeadLayout {
        HeadLayout { dim: usize::from(self.dim), digits: self.digits }
    }

    /// Appends the bytes of some rows of a layer, in the order in which they lie there.
    ///
    /// # Panics
    /// If `layer` is not one, or there are no such rows.
    pub fn gather(&self, layer: &[u8], rows: Range<usize>, out: &mut Vec<u8>) {
        assert_eq!(layer.len(), self.layer_bytes(), "a layer");
        out.reserve(rows.len() * self.row_bytes());
        self.pieces(&rows, |piece| out.extend_from_slice(&layer[piece]));
    }

    /// Puts rows where they lie in a layer: the inverse of [`Plane::gather`].
    ///
    /// # Panics
    /// If `layer` is not one, or `packed` has another length than the rows.
    pub fn scatter(&self, packed: &[u8], layer: &mut [u8], rows: Range<usize>) {
        assert_eq!(layer.len(), self.layer_bytes(), "a layer");
        assert_eq!(packed.len(), rows.len() * self.row_bytes(), "all bytes of the rows");
        let mut from = 0;
        self.pieces(&rows, |piece| {
            let to = from + piece.len();
            layer[piece].copy_from_slice(&packed[from..to]);
            from = to;
        });
    }

    /// Where some rows lie in a layer, ascending.
    fn pieces(&self, rows: &Range<usize>, mut piece: impl FnMut(Range<usize>)) {
        assert!(rows.start <= rows.end && rows.end <= BLOCK_LEN, "rows of a block");
        if *rows == (0..BLOCK_LEN) {
            return piece(0..self.layer_bytes());
        }
        let head = self.head();
        for first in (0..usize::from(self.heads)).map(|index| index * head.bytes()) {
            for plane in (0..head.digits.count()).map(|plane| first + head.k(plane)) {
                for d in (0..head.dim).step_by(4) {
                    piece(
                        plane + head.k_at(rows.start, d)..plane + head.k_at(rows.start, d) + 4 * rows.len(),
                    );
                }
            }
            for plane in (0..head.digits.count()).map(|plane| first + head.v(plane)) {
                let mut row = rows.start;
                while row < rows.end {
                    // Four positions lie together, dim by dim.
                    let end = ((row / 4 + 1) * 4).min(rows.end);
                    for d in 0..head.dim {
                        let at = plane + head.v_at(row, d);
                        piece(at..at + end - row);
                    }
                    row = end;
                }
            }
            for scales in [head.k_scales(), head.v_scales()].map(|scales| first + scales) {
                piece(scales + 4 * rows.start..scales + 4 * rows.end);
            }
        }
    }
}

fn group_number(group: KvGroup) -> u8 {
    match group {
        KvGroup::Full => 0,
        KvGroup::Sliding => 1,
    }
}

pub(crate) fn encode_group(writer: &mut Writer, group: KvGroup) {
    writer.u8(group_number(group));
}

pub(crate) fn decode_group(reader: &mut Reader<'_>) -> Result<KvGroup, Refusal> {
    match reader.u8("group")? {
        0 => Ok(KvGroup::Full),
        1 => Ok(KvGroup::Sliding),
        found => Err(Refusal::Malformed { field: "group", found: u64::from(found) }),
    }
}

pub(crate) fn decode_component(reader: &mut Reader<'_>) -> Result<Component, Refusal> {
    match reader.u8("component")? {
        0 => Ok(Component::Target),
        1 => Ok(Component::Draft),
        found => Err(Refusal::Malformed { field: "component", found: u64::from(found) }),
    }
}

/// The plane table: what a block of each group consists of, in the order in which it lies there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planes(Vec<Plane>);

impl Planes {
    const MOST: usize = 4;

    /// A table.
    ///
    /// # Errors
    /// Unless the planes come by group, then component, each once, and are ones that a chunk can carry.
    pub fn new(planes: Vec<Plane>) -> Result<Self, Refusal> {
        let place = |plane: &Plane| (plane.group, plane.component);
        if planes.is_empty() || !planes.is_sorted_by(|a, b| place(a) < place(b)) {
            return Err(Refusal::Malformed { field: "planes", found: planes.len() as u64 });
        }
        planes.iter().try_for_each(check)?;
        Ok(Self(planes))
    }

    /// The planes.
    pub fn as_slice(&self) -> &[Plane] {
        &self.0
    }

    /// The model's alone, or all.
    #[must_use]
    pub fn select(&self, draft: bool) -> Self {
        Self(self.0.iter().filter(|plane| draft || plane.component == Component::Target).copied().collect())
    }

    /// Are there planes of a draft?
    pub fn has_draft(&self) -> bool {
        self.0.iter().any(|plane| plane.component == Component::Draft)
    }

    /// The plane of some layers.
    pub fn plane(&self, group: KvGroup, component: Component) -> Option<&Plane> {
        self.0.iter().find(|plane| plane.group == group && plane.component == component)
    }

    /// Planes of one group.
    pub fn of_group(&self, group: KvGroup) -> impl Iterator<Item = &Plane> {
        self.0.iter().filter(move |plane| plane.group == group)
    }

    /// Bytes of a block.
    pub fn block_bytes(&self, group: KvGroup) -> usize {
        self.of_group(group).map(|plane| usize::from(plane.layers) * plane.layer_bytes()).sum()
    }

    /// Where a layer lies in a block; `None` if there is no such layer.
    pub fn layer_at(&self, group: KvGroup, component: Component, layer: u16) -> Option<Range<usize>> {
        let mut first = 0;
        for plane in self.of_group(group) {
            if plane.component == component {
                let at = first + usize::from(layer) * plane.layer_bytes();
                return (layer < plane.layers).then(|| at..at + plane.layer_bytes());
            }
            first += usize::from(plane.layers) * plane.layer_bytes();
        }
        None
    }

    pub(crate) fn encode(&self, writer: &mut Writer) {
        writer.list(&self.0, |writer, plane| {
            encode_group(writer, plane.group);
            writer.u8(plane.component as u8);
            writer.u16(plane.layers);
            writer.u16(plane.heads);
            writer.u16(plane.dim);
            writer.u16(plane.digits.count() as u16);
        });
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, Refusal> {
        let planes = reader.list("planes", Self::MOST, 10, |reader| {
            Ok(Plane {
                group: decode_group(reader)?,
                component: decode_component(reader)?,
                layers: reader.u16("layers")?,
                heads: reader.u16("heads")?,
                dim: reader.u16("dim")?,
                digits: match reader.u16("digits")? {
                    1 => Digits::One,
                    2 => Digits::Two,
                    found => return Err(Refusal::Malformed { field: "digits", found: u64::from(found) }),
                },
            })
        })?;
        Self::new(planes)
    }
}

fn check(plane: &Plane) -> Result<(), Refusal> {
    let bounded =
        [("layers", plane.layers, 1..=1_024), ("heads", plane.heads, 1..=64), ("dim", plane.dim, 4..=1_024)];
    for (field, found, bounds) in bounded {
        if !bounds.contains(&found) || (field == "dim" && found % 4 != 0) {
            return Err(Refusal::Malformed { field, found: u64::from(found) });
        }
    }
    Ok(())
}
