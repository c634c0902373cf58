//! Sealing everything anew under the current epoch, so that older ones can be revoked without losing what they sealed.

use super::catalog::Entry;
use super::records::{Expect, object_id};
use super::{Library, Shared};
use crate::kind::Kind;
use crate::object::{Spec, seal};
use crate::{Area, ObjectName, PackError, PackId};

/// What was sealed anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resealed {
    /// Packs.
    pub packs: usize,
    /// Records.
    pub records: usize,
    /// Packs and records that could not be read and stay as they are.
    pub left: usize,
}

impl Library {
    /// Seals every pack and record that an older epoch has sealed under the current one. A process that is killed meanwhile
    /// may cost the pack that it was at (it is computed anew, or found by [`Library::recover`]), never a record.
    pub fn reseal(&self) -> Result<Resealed, PackError> {
        self.refresh()?;
        let mut done = Resealed::default();
        let packs: Vec<PackId> = self.packs().iter().map(|pack| pack.id).collect();
        for id in packs {
            match self.reseal_pack(id) {
                Ok(resealed) => done.packs += usize::from(resealed),
                Err(PackError::Refused { .. } | PackError::NotFound { .. }) => done.left += 1,
                Err(error) => return Err(error),
            }
        }
        let records: Vec<_> = self.writer().records.iter().map(|(key, of)| (*key, *of)).collect();
        for (key, of) in records {
            let keys = self.keys();
            let object = ObjectName { area: Area::Records, id: object_id(&keys, &key, of.1) };
            if self.shared.epoch_of(object).is_ok_and(|epoch| epoch == keys.current_epoch()) {
                continue;
            }
            let Ok((info, bytes)) = self.read_record(&key, of) else {
                done.left += 1;
                continue;
            };
            let expect = Expect::Revision(info.revision);
            match self.put_record_at(&info.kind, &info.name, &bytes, expect, info.written_unix_s) {
                Ok(_) => done.records += 1,
                // Whoever has written it since has sealed it under the current epoch.
                Err(PackError::Changed { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn reseal_pack(&self, id: PackId) -> Result<bool, PackError> {
        self.locked(|shared, view, locked| {
            let Some(_active) = shared.store.activity()? else { return Err(PackError::Busy) };
            let keys = shared.sealing_keys()?;
            let (manifest, _) = shared.read_visible(view, id)?;
            let mut any = false;
            for (.., segment) in manifest.segments() {
                any |= shared.reseal_object(segment.object())?;
            }
            if shared.epoch_of(id.object())? == keys.current_epoch() {
                return Ok(any);
            }
            let sealed =
                seal(&keys, shared.options.encrypt, Spec::plain(Kind::Manifest), id.0, &manifest.encode())?;
            shared.store.replace(&id.object(), &[&sealed.header, &sealed.body])?;
            shared.store.flush()?;
            if let Some(locked) = locked {
                let pinned = view.packs.get(&id).is_some_and(|(_, pinned)| *pinned);
                let digest = sealed.storage_digest();
                view.append(&keys, locked, Entry::Add { pack: id, digest, pinned })?;
            }
            Ok(true)
        })
    }
}

impl Shared {
    fn epoch_of(&self, object: ObjectName) -> Result<u32, PackError> {
        Ok(self.open_object(&self.keys(), object)?.header.epoch)
    }

    /// Seals an object anew; `false` if the current epoch has sealed it.
    fn reseal_object(&self, object: ObjectName) -> Result<bool, PackError> {
        let keys = self.sealing_keys()?;
        let opened = self.open_object(&keys, object)?;
        if opened.header.epoch == keys.current_epoch() {
            return Ok(false);
        }
        let sealed = seal(&keys, self.options.encrypt, opened.header.spec, object.id, &opened.read_all()?)?;
        self.store.replace(&object, &[&sealed.header, &sealed.body])?;
        Ok(true)
    }
}
