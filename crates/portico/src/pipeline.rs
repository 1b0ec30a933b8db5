//! From objects to routes: everything between a source and the data plane, without either.
//!
//! The same for `portico gateway`, `portico check` and `portico routes`, so that they cannot disagree. No I/O, no clock.

use portico_api::meta::Kind;
use portico_api::problem::Problem;
use portico_api::seed::Timeouts;
use portico_routes::book::{Change, RouteBook, Settings};
use portico_routes::rows::RouteRow;
use portico_routes::table::Update;
use portico_source::{Event, Object};

/// All objects, and what follows from them.
#[derive(Debug)]
pub(crate) struct Pipeline {
    book: RouteBook,
    timeouts: Timeouts,
}

impl Pipeline {
    pub(crate) fn new(settings: Settings) -> Self {
        Self { book: RouteBook::new(settings), timeouts: Timeouts::default() }
    }

    /// Notes that an object came, changed or went. What follows is published by [`Self::commit`].
    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::Apply(Object::Service(service)) => self.book.apply(Change::Service(*service)),
            Event::Apply(Object::EndpointSlice(slice)) => self.book.apply(Change::EndpointSlice(*slice)),
            Event::Delete(object) => match object.kind {
                Kind::Service => self.book.apply(Change::RemoveService(object.key)),
                Kind::EndpointSlice => self.book.apply(Change::RemoveEndpointSlice(object.key)),
                _ => {}
            },
            Event::Apply(_) => {}
        }
    }

    /// The routes as they follow from everything applied; `None` if none changed.
    pub(crate) fn commit(&mut self) -> Option<Update> {
        self.book.commit()
    }

    /// The connection settings of the seed.
    pub(crate) fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    /// Every route, in force or not.
    pub(crate) fn rows(&self) -> impl Iterator<Item = RouteRow> {
        self.book.rows()
    }

    /// Everything wrong with the objects, errors first.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self.book.problems().map(std::borrow::Cow::into_owned).collect();
        problems.sort();
        problems
    }
}
